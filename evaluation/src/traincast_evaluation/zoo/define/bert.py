"""BERT with Hugging Face's eager op order (embeddings, post-norm layers, pooler) and its two heads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.sizes import LanguageModelSizes
from traincast_evaluation.zoo.define.views import slice_leading


class Embeddings(nn.Module):
    """Word, token type and position embeddings."""

    position_ids: torch.Tensor
    token_type_ids: torch.Tensor

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_seq_len, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(2, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("position_ids", torch.arange(config.max_seq_len).expand((1, -1)))
        self.register_buffer("token_type_ids", torch.zeros((1, config.max_seq_len), dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, length] to hidden states."""
        batch, length = input_ids.shape
        types = slice_leading(self.token_type_ids, 1, length).expand(batch, length)
        positions = slice_leading(self.position_ids, 1, length)
        embedded = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        embedded = embedded + self.position_embeddings(positions)
        return self.dropout(self.norm(embedded))


class SelfAttention(nn.Module):
    """Multi-head attention, output projection, residual and norm."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.num_heads, self.rate = config.num_heads, config.dropout
        size = config.hidden_size
        self.query, self.key, self.value, self.dense = (nn.Linear(size, size) for _ in range(4))
        self.attention_dropout = nn.Dropout(config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(size, eps=1e-12)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [batch, length, size]; `mask` is added to the scores (none: `sdpa`)."""
        query = self.query(x)
        key, value = self._heads(self.key(x)), self._heads(self.value(x))
        query = self._heads(query)
        if mask is None:
            rate = self.rate if self.training else 0.0
            context = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        else:
            scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
            probabilities = self.attention_dropout(F.softmax(scores + mask, dim=-1))
            context = torch.matmul(probabilities, value)
        merged = context.permute(0, 2, 1, 3).contiguous().view(x.shape)
        return self.norm(self.dropout(self.dense(merged)) + x)


class Layer(nn.Module):
    """Attention and feed-forward, each followed by residual and norm."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.intermediate = nn.Linear(config.hidden_size, config.ffn_size)
        self.output = nn.Linear(config.ffn_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        attended = self.attention(x, mask)
        grown = F.gelu(self.intermediate(attended))
        return self.norm(self.dropout(self.output(grown)) + attended)


class Bert(nn.Module):
    """The encoder with its pooler."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and the pooled first token."""
        mask = None
        if self.config.attention == "eager":
            present = torch.ones(input_ids.shape, device=input_ids.device)
            mask = (1.0 - present[:, None, None, :]) * torch.finfo(torch.float32).min
            mask = mask.to(self.pooler.weight.dtype)
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))


class BertForPreTraining(nn.Module):
    """Masked language model (decoder tied to the word embeddings) and next sentence heads."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        size = config.hidden_size
        self.bert = Bert(config)
        self.transform = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size, eps=1e-12)
        self.decoder = nn.Linear(size, config.vocab_size)
        self.decoder.weight = self.bert.embeddings.word_embeddings.weight
        self.next_sentence = nn.Linear(size, 2)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores over the vocabulary [batch, length, vocab] and over the two sentence relations [batch, 2]."""
        x, pooled = self.bert(input_ids)
        scores = self.decoder(self.norm(F.gelu(self.transform(x))))
        return scores, self.next_sentence(pooled)


class BertForSequenceClassification(nn.Module):
    """A classifier of two classes on the pooled token."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Scores [batch, 2]."""
        return self.classifier(self.dropout(self.bert(input_ids)[1]))


def compute_pretraining_loss(
    outputs: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor, next_sentence: torch.Tensor
) -> torch.Tensor:
    """Masked language model loss plus next sentence loss."""
    scores, relation = outputs
    masked = F.cross_entropy(scores.view(-1, scores.shape[-1]), labels.view(-1))
    return masked + F.cross_entropy(relation.view(-1, 2), next_sentence.view(-1))
