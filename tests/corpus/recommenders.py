"""Recommenders: deepctr and rechub in style, facebookresearch/dlrm, sequences, TorchRec and FBGEMM on one GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.corpus.setups import setup, trained

TORCHREC = ("torchrec", "fbgemm_gpu")
FIELDS, ROWS, DIM = 6, 100, 8


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Fields(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, dim) for _ in range(FIELDS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fields, self.linear = Fields(), Fields(1)
        self.deep = mlp(FIELDS * DIM, 32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.fields(ids)
        pairs = 0.5 * (x.sum(1) ** 2 - (x**2).sum(1)).sum(1)
        return pairs + self.linear(ids).sum((1, 2)) + self.deep(x.flatten(1)).squeeze(1)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fields = Fields()
        self.cross = nn.ModuleList(nn.Linear(FIELDS * DIM, FIELDS * DIM) for _ in range(2))
        self.deep, self.out = mlp(FIELDS * DIM, 32), nn.Linear(FIELDS * DIM + 32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = x = self.fields(ids).flatten(1)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.out(torch.cat([x, self.deep(first)], 1)).squeeze(1)


class AutoInt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fields = Fields()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.out = nn.Linear(FIELDS * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.fields(ids)
        return self.out(functional.relu(self.attention(x, x, x, need_weights=False)[0] + x).flatten(1)).squeeze(1)


class DIN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.weigh, self.out = mlp(4 * DIM, 16, 1), mlp(2 * DIM, 16, 1)

    def forward(self, item: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        wanted, seen = self.items(item), self.items(history)
        each = wanted[:, None].expand_as(seen)
        scores = self.weigh(torch.cat([each, seen, each - seen, each * seen], -1)).squeeze(-1)
        weights = scores.masked_fill(history == 0, -1e9).softmax(-1)
        return self.out(torch.cat([wanted, (weights[..., None] * seen).sum(1)], 1)).squeeze(1)


def clicks(model: nn.Module, batch: int, device: str) -> Any:
    model = model.to(device)
    ids = torch.randint(0, ROWS, (batch, FIELDS), device=device)
    labels = torch.zeros(batch, device=device)
    return trained(model, lambda: functional.binary_cross_entropy_with_logits(model(ids), labels))


@setup("DeepFM", "recommender", batch=16)
def deepfm(batch: int, device: str = "cuda") -> Any:
    return clicks(DeepFM(), batch, device)


@setup("DCN-v2", "recommender", batch=16)
def dcn(batch: int, device: str = "cuda") -> Any:
    return clicks(Cross(), batch, device)


@setup("AutoInt", "recommender", batch=16)
def autoint(batch: int, device: str = "cuda") -> Any:
    return clicks(AutoInt(), batch, device)


@setup("DIN", "recommender", batch=16)
def din(batch: int, device: str = "cuda") -> Any:
    model = DIN().to(device)
    item, history = (torch.randint(0, ROWS, size, device=device) for size in ((batch,), (batch, 12)))
    labels = torch.zeros(batch, device=device)
    return trained(model, lambda: functional.binary_cross_entropy_with_logits(model(item, history), labels))


@setup("two towers, in-batch negatives", "recommender", batch=16)
def two_towers(batch: int, device: str = "cuda") -> Any:
    users, items = (nn.Sequential(nn.Embedding(ROWS, 32), nn.Linear(32, 16)).to(device) for _ in range(2))
    both = nn.ModuleList([users, items])
    ids = torch.randint(0, ROWS, (2, batch), device=device)

    def loss() -> torch.Tensor:
        u, i = (functional.normalize(tower(row), dim=-1) for tower, row in zip((users, items), ids, strict=True))
        return functional.cross_entropy(u @ i.T / 0.05, torch.arange(batch, device=device))

    return trained(both, loss)


class PublishedDLRM(nn.Module):
    """The building blocks of facebookresearch/dlrm: numpy weights put into layers, `param.data` moved."""

    def __init__(self) -> None:
        super().__init__()
        import numpy as np

        self.emb = nn.ModuleList()
        for _ in range(4):
            table = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
            weights = np.random.uniform(low=-0.1, high=0.1, size=(ROWS, DIM)).astype(np.float32)
            table.weight.data = torch.tensor(weights, requires_grad=True)
            self.emb.append(table)
        self.bottom, self.top = self._mlp(5, 16, DIM), self._mlp(DIM + 10, 16, 1)

    def _mlp(self, *sizes: int) -> nn.Sequential:
        import numpy as np

        layers = nn.ModuleList()
        for n, m in zip(sizes, sizes[1:], strict=False):
            layer = nn.Linear(n, m, bias=True)
            layer.weight.data = torch.tensor(np.random.randn(m, n).astype(np.float32), requires_grad=True)
            layer.bias.data = torch.tensor(np.random.randn(m).astype(np.float32), requires_grad=True)
            layers.append(layer)
            layers.append(nn.ReLU())
        return nn.Sequential(*layers)

    def forward(self, dense: torch.Tensor, offsets: Any, indices: Any) -> torch.Tensor:
        x = self.bottom(dense)
        rows = [table(i, o) for table, i, o in zip(self.emb, indices, offsets, strict=True)]
        (batch, d) = x.shape
        t = torch.cat([x, *rows], dim=1).view((batch, -1, d))
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        _, ni, nj = z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return self.top(torch.cat([x, z[:, li, lj]], dim=1))


@setup(
    "facebookresearch/dlrm",
    "recommender",
    batch=16,
    beside="sparse gradients: rows that are equal stay apart in a capture",
)
def published_dlrm(batch: int, device: str = "cuda") -> Any:
    model = PublishedDLRM()
    model = model.to(device)
    dense, target = torch.rand(batch, 5), torch.zeros(batch, 1)
    offsets = [torch.arange(batch) for _ in range(4)]
    indices = [torch.randint(0, ROWS, (batch,)) for _ in range(4)]

    def loss() -> torch.Tensor:
        z = model(dense.to(device), [o.to(device) for o in offsets], [i.to(device) for i in indices])
        return functional.mse_loss(torch.sigmoid(z), target.to(device))

    return trained(model, loss, lambda p: torch.optim.SGD(p, lr=0.1))


@setup("SASRec", "recommender", batch=4)
def sasrec(batch: int, device: str = "cuda") -> Any:
    length = 20
    items, places = nn.Embedding(ROWS + 1, 32, padding_idx=0), nn.Embedding(length, 32)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleList([items, places, encoder]).to(device)
    seen = torch.randint(1, ROWS, (batch, length + 1), device=device)
    mask = torch.triu(torch.full((length, length), float("-inf"), device=device), 1)

    def loss() -> torch.Tensor:
        x = items(seen[:, :-1]) + places(torch.arange(length, device=device))
        states = encoder(x, mask=mask)
        return functional.cross_entropy((states @ items.weight.T).flatten(0, 1), seen[:, 1:].flatten())

    return trained(model, loss)


@setup("GRU4Rec, packed sequences", "recommender", batch=4, beside="one kernel of cuDNN, many on a CPU")
def packed_gru(batch: int, device: str = "cuda") -> Any:
    items, gru, out = nn.Embedding(ROWS, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, ROWS)
    model = nn.ModuleList([items, gru, out]).to(device)
    seen = torch.randint(0, ROWS, (batch, 10), device=device)
    lengths = torch.tensor([10 - i % 3 for i in range(batch)])

    def loss() -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(items(seen), lengths, batch_first=True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(gru(packed)[0], batch_first=True)
        return functional.cross_entropy(out(states[:, -1]), seen[:, 0])

    return trained(model, loss)


@setup("LSTM language model", "language model", batch=4, beside="one kernel of cuDNN, many on a CPU")
def lstm(batch: int, device: str = "cuda") -> Any:
    words, rnn, out = nn.Embedding(ROWS, 32), nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, ROWS)
    model = nn.ModuleList([words, rnn, out]).to(device)
    seen = torch.randint(0, ROWS, (batch, 12), device=device)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(out(rnn(words(seen))[0]).flatten(0, 1), seen.flatten())

    return trained(model, loss)


def jagged(batch: int, device: str) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = torch.full((2 * batch,), 3, dtype=torch.int32)
    values = torch.randint(0, ROWS, (6 * batch,))
    return KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths).to(torch.device(device))


def bags(device: str) -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    tables = [EmbeddingBagConfig(name=f"t_{k}", embedding_dim=16, num_embeddings=ROWS, feature_names=[k]) for k in "ab"]
    return EmbeddingBagCollection(tables=tables, device=torch.device(device))


@setup("TorchRec EmbeddingBagCollection", "recommender", batch=8, needs=TORCHREC)
def torchrec_ebc(batch: int, device: str = "cuda") -> Any:
    collection, over = bags(device), nn.Linear(32, 1).to(device)
    model = nn.ModuleList([collection, over])
    features = jagged(batch, device)
    return trained(model, lambda: over(collection(features).values()).mean())


@setup("TorchRec EmbeddingCollection", "recommender", batch=8, needs=TORCHREC)
def torchrec_ec(batch: int, device: str = "cuda") -> Any:
    from torchrec import EmbeddingCollection, EmbeddingConfig

    tables = [EmbeddingConfig(name=f"t_{k}", embedding_dim=16, num_embeddings=ROWS, feature_names=[k]) for k in "ab"]
    model = EmbeddingCollection(tables=tables, device=torch.device(device))
    features = jagged(batch, device)
    return trained(model, lambda: sum(t.values().mean() for t in model(features).values()))


@setup("TorchRec DLRM", "recommender", batch=8, needs=TORCHREC)
def torchrec_dlrm(batch: int, device: str = "cuda") -> Any:
    from torchrec.models.dlrm import DLRM, DLRMTrain

    dlrm = DLRM(bags(device), 5, [32, 16], [16, 1], dense_device=torch.device(device))
    model = DLRMTrain(dlrm)
    from torchrec.datasets.utils import Batch

    data = Batch(torch.rand(batch, 5, device=device), jagged(batch, device), torch.zeros(batch, device=device))
    return trained(model, lambda: model(data)[0])


@setup(
    "TorchRec fused EmbeddingBagCollection",
    "recommender",
    batch=8,
    needs=TORCHREC,
    beside="FBGEMM's CPU kernels are others",
)
def torchrec_fused(batch: int, device: str = "cuda") -> Any:
    from torchrec import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    tables = [EmbeddingBagConfig(name=f"t_{k}", embedding_dim=16, num_embeddings=ROWS, feature_names=[k]) for k in "ab"]
    collection = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1}, device=torch.device(device))
    over = nn.Linear(32, 1).to(device)
    features = jagged(batch, device)
    return trained(over, lambda: over(collection(features).values()).mean())


@setup(
    "FBGEMM table-batched embeddings", "recommender", batch=8, needs=TORCHREC, beside="FBGEMM's CPU kernels are others"
)
def table_batched(batch: int, device: str = "cuda") -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place, runs = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if device == "cuda" else (
        EmbeddingLocation.HOST, ComputeDevice.CPU)  # fmt: skip
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, 16, place, runs), (ROWS, 32, place, runs)], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1, device=torch.device(device),
    )  # fmt: skip
    over = nn.Linear(48, 1).to(device)
    indices = torch.randint(0, ROWS, (2 * 3 * batch,), device=device)
    offsets = torch.arange(0, 2 * 3 * batch + 1, 3, device=device)
    return trained(over, lambda: over(tables(indices, offsets)).mean())


@setup("HSTU in plain PyTorch", "recommender", batch=4)
def hstu(batch: int, device: str = "cuda") -> Any:
    length, dim, heads = 16, 32, 2
    items, mix, out = nn.Embedding(ROWS, dim), nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
    norm = nn.LayerNorm(dim)
    model = nn.ModuleList([items, mix, out, norm]).to(device)
    seen = torch.randint(0, ROWS, (batch, length), device=device)
    mask = torch.tril(torch.ones(length, length, device=device))

    def loss() -> torch.Tensor:
        x = items(seen)
        u, q, k, v = functional.silu(mix(norm(x))).view(batch, length, 4, heads, -1).permute(2, 0, 3, 1, 4)
        weights = functional.silu(q @ k.transpose(-1, -2)) / length * mask
        y = out(((weights @ v) * u).transpose(1, 2).flatten(2)) + x
        return functional.cross_entropy((y @ items.weight.T).flatten(0, 1), seen.flatten())

    return trained(model, loss)


@setup("HSTU, jagged with fbgemm", "recommender", batch=4, needs=TORCHREC)
def hstu_jagged(batch: int, device: str = "cuda") -> Any:
    import fbgemm_gpu  # noqa: F401

    length, dim = 16, 32
    items, mix, out = nn.Embedding(ROWS, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
    model = nn.ModuleList([items, mix, out]).to(device)
    total = 10 * batch
    seen = torch.randint(0, ROWS, (total,), device=device)
    offsets = torch.arange(0, total + 1, 10, device=device)

    def loss() -> torch.Tensor:
        x = items(seen)
        padded = torch.ops.fbgemm.jagged_to_padded_dense(mix(x), [offsets], [length], 0.0)
        q, k, v = padded.chunk(3, -1)
        y = functional.silu(q @ k.transpose(1, 2)) / length @ v
        (flat,) = torch.ops.fbgemm.dense_to_jagged(y, [offsets], total)[:1]
        return functional.cross_entropy((out(flat) + x) @ items.weight.T, seen)

    return trained(model, loss)
