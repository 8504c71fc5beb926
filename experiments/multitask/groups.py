"""What the makers of CIFAR say about its classes: animals and vehicles, and twenty superclasses."""

import numpy as np

VEHICLES = {"airplane", "automobile", "ship", "truck"}
ANIMALS = {"bird", "cat", "deer", "dog", "frog", "horse"}
SUPERCLASSES = (
    "beaver dolphin otter seal whale",
    "aquarium_fish flatfish ray shark trout",
    "orchid poppy rose sunflower tulip",
    "bottle bowl can cup plate",
    "apple mushroom orange pear sweet_pepper",
    "clock keyboard lamp telephone television",
    "bed chair couch table wardrobe",
    "bee beetle butterfly caterpillar cockroach",
    "bear leopard lion tiger wolf",
    "bridge castle house road skyscraper",
    "cloud forest mountain plain sea",
    "camel cattle chimpanzee elephant kangaroo",
    "fox porcupine possum raccoon skunk",
    "crab lobster snail spider worm",
    "baby boy girl man woman",
    "crocodile dinosaur lizard snake turtle",
    "hamster mouse rabbit shrew squirrel",
    "maple oak palm pine willow",
    "bicycle bus motorcycle pickup_truck train",
    "lawn_mower rocket streetcar tank tractor",
)


def known_groups(names: list[str]) -> np.ndarray | None:
    """Return the graph of classes in the same group, mean 1 over all pairs, or None if unknown."""
    for groups in ([VEHICLES, ANIMALS], [set(line.split()) for line in SUPERCLASSES]):
        if set().union(*groups) == {name.removesuffix("_tree") for name in names}:
            number = [
                next(i for i, g in enumerate(groups) if name.removesuffix("_tree") in g)
                for name in names
            ]
            same = np.equal.outer(number, number) & ~np.eye(len(names), dtype=bool)
            return (same / same.mean() * (1 - 1 / len(names))).astype(np.float32)
    return None
