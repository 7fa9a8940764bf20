"""XLNet (base-cased sizes) with Hugging Face's op order: relative attention by einsum, [length, batch] layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.sizes import LanguageModelSizes


def _shift_relative_scores(x: torch.Tensor, length: int) -> torch.Tensor:
    """Aligns scores by relative position with scores by absolute key."""
    a, b, c, d = x.shape
    x = x.reshape(a, b, d, c)[:, :, 1:, :]
    x = x.reshape(a, b, c, d - 1)
    return torch.index_select(x, 3, torch.arange(length, device=x.device, dtype=torch.int64))


class RelativeAttention(nn.Module):
    """Attention whose scores add content and relative position terms."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        size, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        self.scale = dim**-0.5
        self.q, self.k, self.v, self.o, self.r = (nn.Parameter(torch.empty(size, heads, dim)) for _ in range(5))
        self.r_r_bias, self.r_s_bias, self.r_w_bias = (nn.Parameter(torch.empty(heads, dim)) for _ in range(3))
        self.seg_embed = nn.Parameter(torch.empty(2, heads, dim))
        self.norm = nn.LayerNorm(size, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Hidden states [length, batch, size] and relative positions [2 * length, batch, size]."""
        q, k, v = (torch.einsum("ibh,hnd->ibnd", h, weight) for weight in (self.q, self.k, self.v))
        k_r = torch.einsum("ibh,hnd->ibnd", r, self.r)
        content = torch.einsum("ibnd,jbnd->bnij", q + self.r_w_bias, k)
        position = torch.einsum("ibnd,jbnd->bnij", q + self.r_r_bias, k_r)
        position = _shift_relative_scores(position, content.shape[3])
        # the absent segment term is a literal zero that is added all the same
        scores = (content + position + 0) * self.scale
        probabilities = self.dropout(F.softmax(scores, dim=3))
        vectors = torch.einsum("bnij,jbnd->ibnd", probabilities, v)
        out = self.dropout(torch.einsum("ibnd,hnd->ibh", vectors, self.o))
        return self.norm(out + h)


class Layer(nn.Module):
    """Relative attention and feed-forward."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.attention = RelativeAttention(config)
        self.grow = nn.Linear(config.hidden_size, config.ffn_size)
        self.shrink = nn.Linear(config.ffn_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        h = self.attention(h, r)
        grown = self.dropout(F.gelu(self.grow(h)))
        return self.norm(self.dropout(self.shrink(grown)) + h)


class Xlnet(nn.Module):
    """XLNet with its language model head (tied to the token embeddings)."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mask_embedding = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.head.weight = self.tokens.weight

    def _positions(self, length: int, batch: int) -> torch.Tensor:
        """Sines and cosines of relative positions, made on the host in every step as the original does."""
        size = self.config.hidden_size
        frequencies = 1 / torch.pow(10000, torch.arange(0, size, 2, dtype=torch.int64).float() / size)
        distances = torch.arange(length, -length, -1, dtype=torch.int64).float()
        angles = torch.einsum("i,d->id", distances, frequencies)
        encoded = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)
        return encoded[:, None, :].expand(-1, batch, -1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Scores [batch, length, vocab]."""
        ids = input_ids.transpose(0, 1).contiguous()
        length, batch = ids.shape
        h = self.dropout(self.tokens(ids))
        r = self.dropout(self._positions(length, batch).to(h.device, h.dtype))
        for layer in self.layers:
            h = layer(h, r)
        return self.head(self.dropout(h).permute(1, 0, 2).contiguous())


def compute_token_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all tokens."""
    return F.cross_entropy(scores.view(-1, scores.shape[-1]), labels.view(-1))
