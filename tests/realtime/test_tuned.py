"""Real-time tuning as an optimizer, the outer optimizer behind it, and how far it can be trusted."""

import contextlib
import functools
import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._realtime.constants import USUAL

from ..problems import assert_trees_close, squared_error, squares
from .tuners import EXACT, data, joined, start, tuner

pytestmark = pytest.mark.promotes("Adam and relative_adam multiply floats by counts")


class TestRelativeAdam:
    def test_a_vanishing_gradient_does_not_explode(self):
        optimizer = ft.relative_adam(0.1)
        h = jnp.array(0.5)
        step, _ = optimizer.update(jnp.array(1e-24), optimizer.init(h), h, value=jnp.array(1.0))
        assert abs(step) <= 1.0 * (0.5 + 50)

    def test_steps_are_relative_whatever_the_scale(self):
        optimizer = ft.relative_adam(0.1)
        for scale in (1e-6, 1.0, 1e6):
            h = jnp.array(scale)
            state = optimizer.init(h)
            g = jnp.array(3.0 / scale)  # f is a function of h / scale
            step, _ = optimizer.update(g, state, h, value=jnp.array(1.0))
            assert np.isclose(step / scale, -0.1 * (1 + 0.1 / 3))

    def test_it_waits_for_a_gradient_and_then_leaves_0(self):
        optimizer = ft.relative_adam(0.1)
        h = jnp.zeros(2)
        state = optimizer.init(h)
        step, state = optimizer.update(jnp.zeros(2), state, h, value=jnp.array(1.0))
        assert not np.any(step)
        step, _ = optimizer.update(jnp.array([-2.0, 0.0]), state, h, value=jnp.array(1.0))
        assert step[0] > 0
        assert step[1] == 0

    def test_a_box_is_approached_but_not_reached(self):
        box = ft.Box(0.0, 1.0)
        u = jnp.array(0.9)
        scale = box.scale(u, jnp.array(0.5))
        assert np.isclose(scale, 0.1)
        assert box.scale(jnp.array(1.0), jnp.array(0.0)) > 0

    def test_in_minimize(self):
        problem = ft.Problem(
            ft.Training(lambda w, h, x: (w - x) ** 2 + h["decay"] * w**2, optax.sgd(0.2)),
            lambda state, h, x: (state.params - 0.8) ** 2,
            jnp.array(0.0),
            ft.FullBatch(jnp.array(1.0), steps=50),
        )
        result = ft.minimize(
            problem,
            {"decay": jnp.array(0.0)},
            steps=80,
            optimizer=ft.relative_adam(),
            constraints={"decay": ft.NonNegative()},
        )
        assert abs(float(result.best.hparams["decay"]) - 0.25) < 0.03


def test_the_first_windows_without_updates_are_exact():
    windows, validation = data()
    params, hparams = start()
    realtime = tuner(**EXACT)
    before = state = realtime.init(params, hparams)
    for window in windows:
        state, log = realtime.update(state, window, validation)
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *windows)
    exact = ft.Forward()(realtime.problem(before, whole, validation), log["hparams"]).grad
    assert_trees_close(log["hypergradient"], exact, 1e-4)


def activation(x):
    return jnp.tanh(x)


BOTH = {"loss": lambda params, hparams, batch: 0.0, "error": lambda params, validation: 0.0}


class TestTuned:
    def loss(self, params, batch):
        return squares(params, batch)

    def batches(self, count):
        x, y = joined(data(windows=count // 4)[0])
        return list(zip(x, y, strict=True))

    @pytest.mark.second_tier
    def test_it_is_real_time_tuning_spread_over_calls(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=4, learning_rate=0.01, momentum=0.5)
        state = optimizer.init(params)
        losses = []
        for batch in self.batches(12):
            state, loss = optimizer.update(state, batch, validation)
            losses.append(float(loss))
        realtime = ft.RealTime(
            ft.Training(lambda p, h, b: squares(p, b), lambda h: optax.sgd(**h)),
            squared_error,
            constraints={"learning_rate": ft.NonNegative(), "momentum": ft.Box(0.0, 0.999)},
        )
        other = realtime.init(
            params, {"learning_rate": jnp.array(0.01), "momentum": jnp.array(0.5)}
        )
        for window in data()[0]:
            other, log = realtime.update(other, window, validation)
        assert_trees_close(state.params, other.train.params, 1e-5)
        assert_trees_close(state.hparams, other.hparams, 1e-5)
        assert_trees_close(state.log["hypergradient"], log["hypergradient"], 1e-4)
        assert np.isclose(np.mean(losses[-4:]), log["loss"])

    @pytest.mark.second_tier
    def test_model_state_key_and_hyperparameters_of_the_loss_as_in_real_time(self):
        windows, validation = data()
        key, params = jax.random.key(3), start()[0]

        def loss(params, hparams, batch, scale, *, key):  # scale: a running mean of inputs' sizes
            x, y = batch
            noise = 1 + hparams["noise"] * jax.random.normal(key, y.shape)
            value = squares(params, (x, y * noise)) * scale
            return value, 0.9 * scale + 0.1 * jnp.mean(jnp.abs(x))

        def error(params, validation, scale):
            return squares(params, validation) + scale**2

        optimizer = ft.tuned(
            optax.sgd,
            loss,
            error,
            every=4,
            learning_rate=0.01,
            loss_hparams={"noise": 0.1},
            has_state=True,
            key=key,
        )
        state = optimizer.init((params, np.float32(1.0)))
        for batch in self.batches(12):
            state, _ = optimizer.update(state, batch, validation)
        realtime = ft.RealTime(
            ft.Training(loss, lambda h: optax.sgd(h["learning_rate"]), has_state=True, key=key),
            lambda state, h, validation: error(state.params, validation, state.model_state),
            constraints={"learning_rate": ft.NonNegative(), "noise": ft.NonNegative()},
        )
        hparams = {"learning_rate": jnp.array(0.01), "noise": jnp.array(0.1)}
        other = realtime.init((params, np.float32(1.0)), hparams)
        for window in windows:
            other, log = realtime.update(other, window, validation)
        assert_trees_close(state.params, other.train.params, 1e-5)
        assert_trees_close(state.model_state, other.train.model_state, 1e-6)
        assert_trees_close(state.hparams, other.hparams, 1e-5)
        assert_trees_close(state.log["hypergradient"], log["hypergradient"], 1e-4)
        assert log["hypergradient"]["noise"] != 0

    def test_what_init_is_given(self):
        params, _ = start()
        pairs = ft.tuned(
            optax.sgd,
            lambda params, batch, state: (squares(params, batch), state),
            lambda params, validation, state: squares(params, validation),
            has_state=True,
            learning_rate=0.1,
        )
        with pytest.raises(TypeError, match=r"init\(\(params, model_state\)\).* a dict"):
            pairs.init(params)

    @pytest.mark.second_tier
    def test_the_state_of_an_equinox_model_is_arrays(self):
        key = jax.random.key(0)
        model = eqx.nn.MLP(3, "scalar", 4, 1, activation, activation, key=key)

        def loss(model, batch):
            return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

        optimizer = ft.tuned(optax.sgd, loss, every=2, learning_rate=0.01)
        update = jax.jit(optimizer.update)
        _, validation = data()
        state = optimizer.init(model)
        for batch in self.batches(4):
            state, _ = update(state, batch, validation)
        assert update._cache_size() == 1
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
        assert np.any(state.params.layers[1].weight != model.layers[1].weight)
        halved = jax.tree.map(lambda leaf: leaf / 2, state)
        assert_trees_close(halved.params(np.zeros(3)), halved.params(jnp.zeros(3)), 0)
        again = pickle.loads(pickle.dumps(state))
        assert jax.tree.structure(again) == jax.tree.structure(state)
        assert_trees_close(loss(again.params, validation), loss(state.params, validation), 0)

    @pytest.mark.second_tier
    def test_donated_states_are_gone_and_the_numbers_the_same(self):
        _, validation = data()
        params, _ = start()
        ends = []
        for donate in (False, True):
            optimizer = ft.tuned(optax.sgd, self.loss, every=2, donate=donate, learning_rate=0.01)
            state = first = optimizer.init(params)
            for batch in self.batches(4):
                state, _ = optimizer.update(state, batch, validation)
            ends.append(jax.tree.leaves((state.params, state.hparams, state.log)))
        assert_trees_close(ends[1], ends[0], 0)
        with pytest.raises(ValueError, match=r"reused its memory \(`donate=True`\)"):
            optimizer.update(first, batch, validation)

    def test_parameters_move_at_every_call_and_constants_every_few(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=3, learning_rate=0.01)
        state = optimizer.init(params)
        rates = []
        for batch in self.batches(8):
            before = state.params["w"]
            state, _ = optimizer.update(state, batch, validation)
            assert np.all(state.params["w"] != before)
            rates.append(float(state.hparams["learning_rate"]))
        assert len(set(rates)) == 3
        assert rates[0] == rates[1] == np.float32(0.01)

    def test_a_diverging_window_ends_early(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=50, learning_rate=20.0)
        state = optimizer.init(params)
        for batch in self.batches(40):
            state, _ = optimizer.update(state, batch, validation)
        assert float(state.hparams["learning_rate"]) < 1.0
        assert np.all(np.isfinite(state.params["w"]))

    @pytest.mark.second_tier
    def test_an_equinox_model_with_adamw(self):
        model = eqx.nn.MLP(3, "scalar", 8, 1, key=jax.random.key(0))

        def loss(model, batch):
            return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

        adamw = functools.partial(optax.adamw, eps_root=1e-8)
        optimizer = ft.tuned(adamw, loss, learning_rate=1e-3, b1=0.9, weight_decay=1e-3)
        state = optimizer.init(model)
        _, validation = data()
        first = loss(model, validation)
        for batch in self.batches(60):
            state, _value = optimizer.update(state, batch, validation)
        assert loss(state.params, validation) < first
        assert set(state.hparams) == {"learning_rate", "b1", "weight_decay"}

    def test_a_constant_for_each_layer(self):
        def per_layer(rates):
            groups = {"w": optax.sgd(rates[0]), "b": optax.sgd(rates[1])}
            return optax.partition(groups, {"w": "w", "b": "b"})

        constraints = {"rates": ft.NonNegative()}
        start_at = np.array([0.01, 0.0], np.float32)
        optimizer = ft.tuned(per_layer, self.loss, every=2, constraints=constraints, rates=start_at)
        state = optimizer.init(start()[0])
        for batch in self.batches(8):
            state, _ = optimizer.update(state, batch, data()[1])
        assert state.log["hypergradient"]["rates"].shape == (2,)
        assert np.all(state.hparams["rates"] > start_at)

    def test_a_window_that_is_not_finite_is_left_out(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=4, learning_rate=0.01)
        state = optimizer.init(params)
        x, y = self.batches(8)[0]

        def failed():  # the host sees it in this call, or in the next
            bad, _ = jax.block_until_ready(optimizer.update(state, (x * np.nan, y), validation))
            return bad, optimizer.update(bad, (x, y), validation)[1]

        with pytest.warns(RuntimeWarning, match=r"window 0 .*data\['batch'\]\[0\].*left out"):
            bad, loss = failed()
        assert bad.log["dropped"]
        assert_trees_close(bad.params, params, 0)
        assert np.isfinite(loss)

    @pytest.mark.parametrize("traced", [False, True])
    def test_a_derivative_that_is_not_finite_does_not_stop_the_training(self, traced):
        (params, _), (_, validation) = start(), data()
        x, y = self.batches(8)[0]
        x[:, 1] = 0.0  # a pixel that is always 0
        adam = ft.tuned(optax.adam, self.loss, every=2, learning_rate=0.01)
        update = jax.jit(adam.update) if traced else adam.update

        def trained():
            state = adam.init(params)
            for _ in range(5):
                state, _ = update(state, (x, y), validation)
                jax.block_until_ready(state)
            jax.effects_barrier()
            return state

        with pytest.warns(RuntimeWarning, match=r"window 0 .*\['w'\].*eps_root") as said:
            state = trained()
        assert len(said) == 1
        assert not np.allclose(state.params["w"], params["w"])
        assert state.hparams["learning_rate"] != np.float32(0.01)

    def test_it_does_not_wait_for_the_device(self, monkeypatch):
        _, validation = data()
        optimizer = ft.tuned(optax.sgd, self.loss, every=4, learning_rate=0.01)
        state = optimizer.init(start()[0])
        batches = self.batches(12)
        x, y = batches[2]
        batches[2] = np.full_like(x, np.nan), y
        array, waits = type(jnp.zeros(())), []
        for name in ("__bool__", "__int__", "__float__", "__array__"):
            real = getattr(array, name)

            def convert(self, *args, real=real, **kwargs):
                waits.append(self.shape)
                return real(self, *args, **kwargs)

            monkeypatch.setattr(array, name, convert)
        monkeypatch.setattr(array, "is_ready", lambda self: False)  # a slow device
        for batch in batches[:4]:
            state, _ = optimizer.update(state, batch, validation)
        assert waits == []
        for batch in batches[4:6]:
            state, _ = optimizer.update(state, batch, validation)
        assert len(waits) == 2  # for calls that are four calls old
        with pytest.warns(RuntimeWarning, match=r"window 0 .*data\['batch'\]\[0\]"):
            state, _ = optimizer.update(state, batches[6], validation)
        monkeypatch.undo()
        assert_trees_close(state.anchor.window, 1, 0)  # of batches 3 to 6: nothing was lost
        assert not state.log["dropped"]
        clean = optimizer.init(start()[0])
        for batch in batches[3:7]:
            clean, _ = optimizer.update(clean, batch, validation)
        assert_trees_close(state.params, clean.params, 1e-6)

    def test_inside_jit_with_a_donated_state_it_compiles_once(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=2, learning_rate=0.01)
        update = jax.jit(optimizer.update, donate_argnums=0)
        state = optimizer.init(params)
        for batch in self.batches(8):
            state, _ = update(state, batch, validation)
        assert update._cache_size() <= 2
        assert np.all(np.isfinite(state.params["w"]))

    def test_what_is_not_known_by_name_needs_a_constraint(self):
        def factory(lr, sharpness, tilt):
            return optax.sgd(lr * (1 + sharpness + tilt))

        given = {"lr": 0.01, "sharpness": 0.1, "tilt": 0.0}
        with pytest.raises(
            ValueError, match=r'for sharpness, tilt.*"sharpness": ft\.Box.*None for'
        ):
            ft.tuned(factory, self.loss, **given)
        free = ft.tuned(factory, self.loss, constraints={"sharpness": None, "tilt": None}, **given)
        free.init(start()[0])
        with pytest.raises(ValueError, match=r"beta=1\.0.*constraints="):  # no momentum, that
            ft.tuned(optax.optimistic_gradient_descent, self.loss, learning_rate=0.1, beta=1.0)

    def test_every_real_constant_of_optax_is_known_by_name(self):
        ask = {"alpha", "gamma", "f_min", "lower_bound"}  # which have no usual set
        functions = {**vars(optax), **vars(optax.contrib)}.values()
        signatures = [inspect.signature(f) for f in functions if inspect.isfunction(f)]
        constants = {"learning_rate", "momentum", "weight_decay", "decay"}
        for signature in signatures:
            if "learning_rate" in signature.parameters:
                given = signature.parameters.values()
                constants |= {p.name for p in given if isinstance(p.default, float)}
        assert len(constants) > 30
        assert constants - ask - set(USUAL) == set()

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            (
                {"learning_rate": 0.1, "nesterov": True},
                TypeError,
                r"nesterov=True.*functools\.partial",
            ),
            ({"learning_rate": None}, TypeError, "learning_rate=None.*no number"),
            ({"learning_rate": "0.1"}, TypeError, "learning_rate='0.1'.*no number"),
            ({"learning_rate": [0.1]}, TypeError, "no number"),
            ({"learning_rate": np.array(0.1j)}, TypeError, "no number"),
            ({"learning_rate": np.array(True)}, TypeError, "no number"),
            ({"learning_rate": np.nan}, ValueError, "learning_rate=nan.*finite"),
            ({"learning_rate": np.array([0.1, np.inf])}, ValueError, "finite"),
            ({"learning_rate": np.zeros(0)}, ValueError, "finite"),
            ({"learning_rate": np.float64(0.1), "momentum": 0}, None, ""),
            ({"momentum": 0.1}, TypeError, "'learning_rate'"),
            ({"rate": 0.1}, TypeError, "`sgd` cannot be called with rate alone"),
            ({"learning_rate": -0.1}, ValueError, r"learning_rate=-0\.1.* outside NonNegative"),
            ({}, ValueError, "nothing to tune"),
            ({"every": 0}, ValueError, "every=0"),
            ({"every": True}, ValueError, "every=True"),
            ({"loss": lambda params: 0.0}, TypeError, r"loss\(params, batch\)"),
            ({"key": jax.random.key(0)}, TypeError, r"loss\(params, batch, key=\.\.\.\)"),
            ({"has_state": True}, TypeError, r"loss\(params, batch, model_state\)"),
            ({"loss_hparams": {"noise": 0.1}}, TypeError, r"loss\(params, hparams, batch\)"),
            (
                {"loss_hparams": {"noise": 0.1}, "loss": lambda p, h, b: 0.0},
                TypeError,
                r"needs an `error\(params, validation\)`",
            ),
            (
                {"has_state": True, "loss": lambda p, b, s: (0.0, s), "error": lambda p, v: 0.0},
                TypeError,
                r"error\(params, validation, model_state\)",
            ),
            (
                {"loss_hparams": {"noise": "0.1"}} | BOTH,
                TypeError,
                "noise='0.1'.*Keep it in the loss",
            ),
            ({"loss_hparams": {"learning_rate": 1}} | BOTH, ValueError, "one name for two"),
            ({"loss_hparams": {"spin": 1.0}} | BOTH, ValueError, "no usual set for spin"),
            ({"loss_hparams": {"dropout": 1.0}} | BOTH, ValueError, r"dropout=1\.0.* outside"),
        ],
    )
    def test_what_it_is_made_of(self, given, error, message):
        names = set(inspect.signature(ft.tuned).parameters) - {"hparams"}
        constants = {} if set(given) - names or not given else {"learning_rate": 0.1}
        arguments = {"optimizer": optax.sgd, "loss": self.loss} | constants | given
        with pytest.raises(error, match=message) if error else contextlib.nullcontext():
            ft.tuned(**arguments)

    def test_what_update_is_given(self):
        validation, (batch, *_) = data()[1], self.batches(4)
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, learning_rate=0.1)
        state = optimizer.init(params)

        def refused(error, message, state=state, batch=batch, validation=validation):
            with pytest.raises(error, match=message):
                optimizer.update(state, batch, validation)

        refused(TypeError, r"batch\[0\] is a Python list of 8", batch=(batch[0].tolist(), batch[1]))
        optimizer.update(state, batch, validation)
        refused(Exception, r"objective\(state", validation={"x": validation[0]})
        refused(TypeError, "dot_general", batch=(np.ones((8, 5), np.float32), batch[1]))
        adam = ft.tuned(optax.adam, self.loss, learning_rate=0.1)
        refused(ValueError, r"opt_state\[0\]\.count is int32\[\]", state=adam.init(params))
        momentum = ft.tuned(optax.sgd, self.loss, learning_rate=0.1, momentum=0.5)
        refused(ValueError, r"\['learning_rate', 'momentum'\]", state=momentum.init(params))
        optimizer.update(state, batch, validation)

    def test_losses_and_starts_that_do_not_fit(self):
        validation, (batch, *_) = data()[1], self.batches(4)
        params, _ = start()
        each = lambda params, batch: batch[0] @ params["w"] - batch[1]  # noqa: E731
        vector = ft.tuned(optax.sgd, each, learning_rate=0.1)
        with pytest.raises(TypeError, match=r"loss must return(.|\n)*float32\[8\]"):
            vector.update(vector.init(params), batch, validation)
        vector = ft.tuned(optax.sgd, self.loss, each, learning_rate=0.1)
        with pytest.raises(ValueError, match=r"objective must return(.|\n)*float32\[20\]"):
            vector.update(vector.init(params), batch, validation)
        any_number = {"foo": None}
        unused = ft.tuned(
            lambda lr, foo: optax.sgd(lr), self.loss, constraints=any_number, lr=0.1, foo=1.0
        )
        with pytest.raises(ValueError, match="does not depend on hparams\\['foo'\\]"):
            unused.update(unused.init(params), batch, validation)
        with pytest.raises(ft.NonFiniteError, match=r"params\['b'\] .* is not finite"):
            unused.init(params | {"b": np.float32(np.nan)})
