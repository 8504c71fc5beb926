"""PyTorch modules through the bridge, against PyTorch's own gradients of an unrolled training."""

import copy
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

MISSING = {"reason": "foretune[torch] is not installed", "exc_type": ImportError}
torch = pytest.importorskip("torch", **MISSING)
ftt = pytest.importorskip("foretune.torch", **MISSING)

ROOT = Path(__file__).parents[2]
nn, F = torch.nn, torch.nn.functional
STEPS, BATCH, CLASSES = 4, 6, 3


class Attention(nn.Module):
    """A small transformer: embedding, one encoder layer, a mean over the sequence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        places = (
            torch.arange(x.shape[1]) / x.shape[1]
        )  # made on the fly, on no device in particular
        return self.head(self.encoder(self.embed(x) + places[:, None]).mean(1))


class Differentiable(nn.BatchNorm2d):
    """Batch normalisation with running statistics that PyTorch differentiates, by hand."""

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            n = x.numel() / x.shape[1]
            self.running_mean = 0.9 * self.running_mean + 0.1 * mean
            self.running_var = 0.9 * self.running_var + 0.1 * var * n / (n - 1)
        mean, var, weight, bias = (v[:, None, None] for v in (mean, var, self.weight, self.bias))
        return (x - mean) / torch.sqrt(var + self.eps) * weight + bias


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def cnn(norm=nn.BatchNorm2d):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        norm(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def data(name):
    rng = np.random.default_rng(0)
    n = STEPS * BATCH + 12
    shape = {"mlp": (n, 5), "cnn": (n, 1, 6, 6), "attention": (n, 4)}[name]
    x = rng.normal(size=shape).astype(np.float32)
    if name == "attention":
        x = rng.integers(0, 7, shape)
    y = rng.integers(0, CLASSES, n)
    rows = np.arange(STEPS * BATCH).reshape(STEPS, BATCH)
    return (x[rows], y[rows], rows), (x[STEPS * BATCH :], y[STEPS * BATCH :])


def hyperparameters(lr=0.3):
    weight = np.linspace(0.5, 1.5, STEPS * BATCH, dtype=np.float32)
    return {"lr": np.float32(lr), "decay": np.float32(0.05), "weight": weight}


def unrolled(module, batches, validation, hparams, train_error=True):
    """Return the error and its gradients by PyTorch: SGD written out, differentiated twice."""
    h = {name: torch.tensor(v, requires_grad=True) for name, v in hparams.items()}
    w = dict(module.named_parameters())
    module.train()
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):  # the fused one has no second
        for x, y, i in zip(*map(torch.tensor, batches), strict=True):
            losses = F.cross_entropy(torch.func.functional_call(module, w, x), y, reduction="none")
            decay = h["decay"] * sum((p**2).sum() for p in w.values())
            loss = (h["weight"][i] * losses).mean() + decay
            grads = torch.autograd.grad(loss, list(w.values()), create_graph=True)
            w = {n: p - h["lr"] * g for (n, p), g in zip(w.items(), grads, strict=True)}
        module.train(train_error)
        x, y = map(torch.tensor, validation)
        error = F.cross_entropy(torch.func.functional_call(module, w, x), y)
        return error.item(), dict(zip(h, torch.autograd.grad(error, list(h.values())), strict=True))


def bridged(model, batches, validation, train_error=True):
    """Return the same as a problem of foretune."""

    def losses(params, buffers, x, y, train):
        result = model.apply(params, x, buffers=buffers, train=train)
        logits, buffers = result if train else (result, buffers)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y), buffers

    def loss(params, hparams, batch, buffers):
        x, y, i = batch
        values, buffers = losses(params, buffers, x, y, train=True)
        decay = hparams["decay"] * sum(jnp.sum(p**2) for p in params.values())
        return jnp.mean(hparams["weight"][i] * values) + decay, buffers

    return ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"]), has_state=True),
        lambda s, h, v: jnp.mean(losses(s.params, s.model_state, *v, train=train_error)[0]),
        init=(model.params, model.buffers),
        batches=batches,
        validation=validation,
    )


def assert_same(ours, theirs, tolerance=1e-4):
    for name, expected in theirs.items():
        difference = np.max(np.abs(np.asarray(ours[name]) - np.asarray(expected)))
        assert difference <= tolerance * np.max(np.abs(np.asarray(expected))), name


def as_jax(tree):
    return jax.tree.map(jnp.asarray, tree)


@pytest.mark.parametrize(("name", "make"), [("mlp", mlp), ("cnn", cnn), ("attention", Attention)])
def test_hypergradients_are_those_of_pytorch(name, make):
    torch.manual_seed(0)
    module, (batches, validation) = make(), data(name)
    model, hparams = ftt.bridge(module), hyperparameters()
    value, grads = unrolled(copy.deepcopy(module), batches, validation, hparams)
    problem = bridged(model, batches, validation)
    for engine in (ft.Reverse(), ft.Forward()):
        ours = engine(problem, as_jax(hparams))
        assert ours.value == pytest.approx(value, rel=1e-5)
        assert_same(ours.grad, grads)

    x = validation[0]
    state = ours.state
    before = copy.deepcopy(module.state_dict())
    assert model.load(state.params, state.model_state) is module
    assert any(not torch.equal(before[n], v) for n, v in module.state_dict().items())
    module.eval()
    with torch.no_grad():
        expected = module(torch.tensor(x)).numpy()
    ours = model.apply(state.params, x, buffers=state.model_state)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def of_transformers(name):
    """Return a small model from a config, without dropout, and inputs for it."""
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    words = rng.integers(0, 11, (STEPS, BATCH, 5))
    side = 16 if name == "ResNet" else 8
    pictures = rng.normal(size=(STEPS, BATCH, 3, side, side)).astype(np.float32)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    common = {"num_labels": CLASSES, "attn_implementation": "eager"}
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2} | dropout | common
    small["intermediate_size"] = 12
    if name == "BERT":
        config = transformers.BertConfig(vocab_size=11, max_position_embeddings=8, **small)
        return transformers.BertForSequenceClassification(config), words
    if name == "GPT-2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0}
        sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        config = transformers.GPT2Config(**sizes, **drop, use_cache=False, **common)
        return transformers.GPT2ForSequenceClassification(config), words
    if name == "ViT":
        config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=3, **small)
        return transformers.ViTForImageClassification(config), pictures
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(**sizes, num_labels=CLASSES)
    return transformers.ResNetForImageClassification(config), pictures


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "ViT", "ResNet"])
def test_models_of_transformers_have_the_hypergradients_of_pytorch(name):
    torch.manual_seed(0)
    module, x = of_transformers(name)
    y = np.random.default_rng(1).integers(0, CLASSES, (STEPS, BATCH))
    rows = np.arange((STEPS - 1) * BATCH).reshape(STEPS - 1, BATCH)
    batches, validation = (x[:-1], y[:-1], rows), (x[-1], y[-1])
    module, hparams = Logits(module), hyperparameters()
    model = ftt.bridge(module)
    value, grads = unrolled(copy.deepcopy(module), batches, validation, hparams)
    ours = ft.Reverse()(bridged(model, batches, validation), as_jax(hparams))
    assert ours.value == pytest.approx(value, rel=1e-5)
    for n, expected in grads.items():
        if n == "weight":  # of all rows, of which the last batch is not used here
            np.testing.assert_allclose(ours.grad[n], expected, atol=1e-4)
        else:
            np.testing.assert_allclose(ours.grad[n], expected, rtol=1e-4)


def test_outputs_of_transformers_keep_their_names():
    module, x = of_transformers("BERT")
    model = ftt.bridge(module)
    logits = model.apply(model.params, x[0], buffers=model.buffers).logits
    module.eval()
    with torch.no_grad():
        np.testing.assert_allclose(logits, module(torch.tensor(x[0])).logits, rtol=1e-4, atol=1e-6)


def test_running_statistics_are_part_of_the_response():
    """PyTorch's own batch norm cuts the gradient at its running statistics; ours does not."""
    torch.manual_seed(0)
    module, reference = cnn(), cnn(Differentiable)
    reference.load_state_dict(module.state_dict())
    batches, validation = data("cnn")
    hparams = hyperparameters()
    value, grads = unrolled(reference, batches, validation, hparams, train_error=False)
    model = ftt.bridge(module)
    problem = bridged(model, batches, validation, train_error=False)
    ours = ft.Forward()(problem, as_jax(hparams))
    assert ours.value == pytest.approx(value, rel=1e-5)
    assert_same(ours.grad, grads)
    assert ours.state.model_state["1.num_batches_tracked"].dtype == jnp.int32
    model.load(ours.state.params, ours.state.model_state)
    assert module[1].num_batches_tracked.item() == STEPS
    expected = {n: b.detach() for n, b in reference.named_buffers() if "tracked" not in n}
    assert_same({n: b.numpy() for n, b in module.named_buffers()}, expected)


def test_real_time_tuning_carries_the_same_derivative():
    torch.manual_seed(0)
    module, (batches, validation) = mlp(), data("mlp")
    problem = bridged(ftt.bridge(module), batches, validation)
    _, grads = unrolled(module, batches, validation, hyperparameters())
    tuner = ft.RealTime(problem.dynamics, objective=problem.objective)
    state = tuner.init(problem.init, as_jax(hyperparameters()))
    _, log = tuner.update(state, as_jax(batches), as_jax(validation))
    assert_same(log["hypergradient"], grads)


def test_running_statistics_are_those_of_pytorch():
    x = torch.randn(6, 2, 5)
    for module in (
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2, affine=False, momentum=0.3),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
    ):
        model = ftt.bridge(module)
        y, buffers = model.apply(model.params, x.numpy(), buffers=model.buffers, train=True)
        np.testing.assert_allclose(y, module(x).detach(), atol=1e-5)
        for name, expected in module.named_buffers():
            np.testing.assert_allclose(buffers[name], expected, rtol=1e-5, atol=1e-6)
        y = model.apply(model.params, x.numpy(), buffers=buffers)
        np.testing.assert_allclose(y, module.eval()(x).detach(), atol=1e-5)


def test_dropout_draws_from_the_key():
    model = ftt.bridge(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Dropout(0.5)))
    x = jnp.ones((200, 3))
    apply = jax.jit(lambda key: model.apply(model.params, x, train=True, key=key)[0])
    first, again, other = (apply(jax.random.key(k)) for k in (0, 0, 1))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)
    plain = model.apply(model.params, x)
    kept = first != 0
    assert 0.15 < jnp.mean(kept) < 0.35  # two independent masks
    np.testing.assert_allclose(first[kept], 4 * plain[kept], rtol=1e-5)
    with pytest.raises(ValueError, match="there is no key") as raised:
        model.apply(model.params, x, train=True)
    assert "'1' (Dropout)" in raised.value.__notes__[0]


def test_dropout_in_a_training_is_replayed():
    model = ftt.bridge(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)))

    def loss(params, hparams, batch, key):
        return jnp.mean(model.apply(params, batch, train=True, key=key)[0] ** 2)

    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"]), key=jax.random.key(0)),
        lambda state, h, x: jnp.mean(model.apply(state.params, x) ** 2),
        init=model.params,
        batches=ft.FullBatch(jnp.eye(3), steps=5),
        validation=jnp.eye(3),
    )
    ft.check_hypergradient(problem, {"lr": jnp.array(0.1)})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight
        self.decoder.bias.requires_grad_(False)
        self.shift, self.scales = torch.tensor([1.0, 2.0, 3.0]), [torch.full((3,), 2.0)]

    def forward(self, x, power=1):
        y = self.decoder(torch.tanh(self.encoder(x)) + self.shift) * self.scales[0]
        return {"y": y**power, "shift": self.shift}


def test_tied_frozen_and_plain_tensors():
    torch.manual_seed(0)
    module = Tied()
    model, x = ftt.bridge(module), torch.eye(3)
    assert sorted(model.params) == ["encoder.bias", "encoder.weight"]  # one leaf, and one frozen
    outputs = model.apply(model.params, x.numpy(), power=2)
    np.testing.assert_allclose(outputs["y"], module(x, power=2)["y"].detach(), rtol=1e-4)
    np.testing.assert_allclose(outputs["shift"], module.shift)
    grads = jax.grad(lambda p: jnp.sum(model.apply(p, jnp.eye(3))["y"] ** 2))(model.params)
    (module(x)["y"] ** 2).sum().backward()
    assert_same(grads, {n: p.grad for n, p in module.named_parameters() if p.requires_grad})
    model.load(jax.tree.map(jnp.ones_like, model.params))
    assert module.decoder.weight is module.encoder.weight
    assert bool((module.decoder.weight == 1).all())
    assert module.training


class Constants(nn.Module):
    """Uses values without their gradient, and keeps a buffer, in PyTorch's ways."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("average", torch.ones(2))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("square", torch.zeros(2))

    def forward(self, x):
        with torch.no_grad():
            norm = (self.w * self.w).sum().sqrt()
            self.average.mul_(0.5).add_(self.w)
            self.average[0].add_(1.0)
            self.average[1] += 1.0
            torch.mul(self.w, self.w, out=self.square)
        self.last = self.w * 3  # replaced, not changed in place
        return (self.w / norm * x).sum() + (self.w.detach() * self.w + self.square).sum()


def test_no_grad_detach_and_buffers_are_as_in_pytorch():
    module, x = Constants(), torch.tensor([3.0, 5.0])
    model = ftt.bridge(module)

    @torch.no_grad()  # around the call it means nothing
    def value(params):
        return model.apply(params, jnp.array([3.0, 5.0]), buffers=model.buffers, train=True)

    (y, buffers), grads = jax.value_and_grad(value, has_aux=True)(model.params)
    expected = module(x)
    expected.backward()
    assert float(y) == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(grads["w"], module.w.grad, rtol=1e-6)
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(buffers[name], buffer.detach(), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LSTM(4, 3, batch_first=True), (2, 5, 4)),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), (5, 4)),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (5, 4)),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Upsample(scale_factor=2)), (2, 1, 4, 4)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_layers_have_the_gradients_and_buffers_of_pytorch(make, shape):
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    model = ftt.bridge(module)

    def value(params):
        y, buffers = model.apply(params, x.numpy(), buffers=model.buffers, train=True)
        return jnp.sum(jnp.sin(y[0] if isinstance(y, tuple) else y)), buffers

    (ours, buffers), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(model.params)
    y = module(x)
    expected = (y[0] if isinstance(y, tuple) else y).sin().sum()
    expected.backward()
    assert float(ours) == pytest.approx(expected.item(), rel=1e-5)
    assert_same(grads, {name: p.grad for name, p in module.named_parameters()})
    assert_same(buffers, dict(module.named_buffers()))


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.kept = function, torch.zeros(2)

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (lambda m, x: torch.special.airy_ai(x), NotImplementedError, "aten::special_airy_ai"),
        (lambda m, x: Sign.apply(x), NotImplementedError, "custom torch.autograd.Function"),
        (lambda m, x: m.kept.add_(x), NotImplementedError, "add_ changes a tensor .* not a buffer"),
        (lambda m, x: x if x.sum() > 0 else -x, jax.errors.ConcretizationTypeError, "bool"),
    ],
)
def test_what_cannot_be_carried_over_is_named(function, error, says):
    model = ftt.bridge(nn.Sequential(nn.Identity(), nn.Sequential(Calls(function))))
    with pytest.raises(error, match=f"(?s){says}") as raised:
        jax.jit(lambda x: model.apply({}, x))(jnp.ones(2))
    told = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
    assert "the module '1.0' (Calls)" in told


@pytest.mark.parametrize(
    ("module", "error", "says"),
    [
        (lambda: nn.LazyLinear(3), ValueError, "weight has no shape yet"),
        (lambda: nn.Linear(2, 1, device="meta"), ValueError, "weight is on the device meta"),
        (lambda: nn.Linear(2, 1).double(), ValueError, "weight is torch.float64, and JAX"),
        (lambda: torch.jit.trace(nn.Tanh(), torch.ones(2)), TypeError, "is compiled"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_are_refused(module, error, says):
    with pytest.raises(error, match=says):
        ftt.bridge(module())


def test_wrong_arguments():
    model, x = ftt.bridge(nn.BatchNorm1d(2)), np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match=r"has buffers \(running_mean"):
        model.apply(model.params, x)
    with pytest.raises(ValueError, match="has buffers"):
        model.load(model.params)
    with pytest.raises(ValueError, match=r"\['bias', 'weight'\], got \['weight'\]"):
        model.apply({"weight": model.params["weight"]}, x, buffers=model.buffers)
    with pytest.raises(ValueError, match=r"params\['bias'\] is float32\[3\]"):
        model.load({**model.params, "bias": jnp.ones(3)}, model.buffers)
    with pytest.raises(TypeError, match="is a PyTorch tensor"):
        model.apply(model.params, torch.ones(3, 2), buffers=model.buffers)


def test_the_module_and_the_bridge_share_no_memory():
    module = nn.Linear(2, 2).to(torch.bfloat16)
    model = ftt.bridge(module)
    before = np.array(model.params["bias"].astype(jnp.float32))
    with torch.no_grad():
        module.bias.add_(1)
    np.testing.assert_array_equal(model.params["bias"].astype(jnp.float32), before)
    model.load(model.params)
    np.testing.assert_array_equal(module.bias.detach().float(), before)
    assert model.params["bias"].dtype == jnp.bfloat16


def test_a_missing_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("foretune.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchax", None)
    with pytest.raises(ImportError, match=r"foretune\[torch\]"):
        __import__("foretune.torch")


def test_the_guide_runs():
    pytest.importorskip("transformers")
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "docs/guides/torch.md").read_text(), re.DOTALL)
    namespace = {}
    for block in blocks:
        exec(compile(block, "docs/guides/torch.md", "exec"), namespace)
    assert len(blocks) > 1


def test_the_example_learns(capsys, monkeypatch):
    pytest.importorskip("sklearn")
    path = ROOT / "examples" / "torch_bridge.py"
    monkeypatch.setattr("sys.argv", [str(path), "--steps", "40", "--hyper-steps", "6"])
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    accuracy = re.search(r"test accuracy ([\d.]+) %", capsys.readouterr().out)
    assert float(accuracy[1]) > 80
