"""`stand_ins.py SCRIPT ARGUMENTS` runs a script whose data sets are not downloaded: random ones of their shape."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from typing import Any


class _Pictures:
    """A data set of random pictures with labels, as torchvision's have them."""

    size: tuple[int, ...] = (28, 28)
    classes = tuple(range(10))

    def __init__(self, *args: Any, transform: Any = None, target_transform: Any = None, **kwargs: Any) -> None:
        import torch

        self.transform = transform
        self.data = torch.randint(0, 255, (2000, *self.size), dtype=torch.uint8)
        self.targets = torch.randint(0, 10, (2000,))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        picture: Any = Image.fromarray(self.data[index].numpy())
        return (self.transform(picture) if self.transform else picture), int(self.targets[index])


class _ColourPictures(_Pictures):
    size = (32, 32, 3)


def _replace_pictures() -> None:
    from torch import nn
    from torchvision import datasets
    from torchvision.models import WeightsEnum

    load = nn.Module.load_state_dict
    WeightsEnum.get_state_dict = lambda self, *args, **kwargs: {}  # weights stay random
    nn.Module.load_state_dict = lambda self, state, *args, **kwargs: (
        load(self, state, *args, **kwargs) if state else None
    )

    datasets.MNIST = datasets.FashionMNIST = _Pictures
    datasets.CIFAR10 = datasets.CIFAR100 = _ColourPictures


def _replace_graphs() -> None:
    from torch_geometric import datasets

    class Nodes(datasets.FakeDataset):
        def __init__(self, *args: Any, transform: Any = None, **kwargs: Any) -> None:
            super().__init__(1, avg_num_nodes=2708, avg_degree=4, num_channels=256, num_classes=7, task="node",
                             transform=transform)  # fmt: skip
            number = self._data.num_nodes
            for part, name in enumerate(("train_mask", "val_mask", "test_mask")):
                import torch

                self._data[name] = torch.arange(number) % 3 == part

    class Graphs(datasets.FakeDataset):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(600, avg_num_nodes=18, avg_degree=2, num_channels=7, num_classes=2, task="graph")

    datasets.Planetoid, datasets.TUDataset = Nodes, Graphs


def _name_old_types() -> None:
    """Names that NumPy 2 and SciPy no longer have, which older libraries use."""
    import numpy as np

    for name, kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
        if not hasattr(np, name):
            setattr(np, name, kind)
    if find_spec("scipy") is not None:
        from scipy.sparse import dok_matrix

        dok_matrix._update = lambda self, entries: self._dict.update(entries)


if __name__ == "__main__":
    _name_old_types()
    if find_spec("torchvision") is not None:
        _replace_pictures()
    if find_spec("torch_geometric") is not None and "pytorch_geometric" in sys.argv[1]:
        _replace_graphs()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # noqa: PTH100, PTH120
    runpy.run_path(sys.argv[0], run_name="__main__")
