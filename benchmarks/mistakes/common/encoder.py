"""A tiny Transformer without the Hugging Face stack, what is built on it, and rows of random words."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import Dataset


class Block(nn.Module):
    """A layer: attention and a perceptron."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows, words, width = x.shape
        parts = self.qkv(self.n1(x)).view(rows, words, 3, self.heads, width // self.heads)
        mixed = scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, words, width))
        return x + self.down(gelu(self.up(self.n2(x))))


class Encoder(nn.Module):
    def __init__(self, words: int = 97, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Classifier(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.enc, self.head = Encoder(), nn.Linear(32, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.enc(ids).mean(1))


class LanguageModel(nn.Module):
    def __init__(self, words: int = 97, tied: bool = False) -> None:
        super().__init__()
        self.enc, self.lm_head = Encoder(words), nn.Linear(32, words, bias=False)
        if tied:
            self.lm_head.weight = self.enc.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.enc(ids))


def next_words(logits: Tensor, ids: Tensor, **options: str) -> Tensor:
    """The loss of a language model; ids of -100 don't count."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), **options)


class MultiTask(nn.Module):
    """Says a class and a value of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.cls, self.reg = Encoder(), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.enc(ids).mean(1)
        return self.cls(h), self.reg(h).squeeze(-1)


class Rows(Dataset):
    """Rows of 12 words, which differ in content: two views, a class and a value of each."""

    def __init__(self, rows: int = 32, classes: int = 4, seed: int = 7) -> None:
        g = torch.Generator().manual_seed(seed)
        self.ids, self.ids2 = torch.randint(1, 97, (2, rows, 12), generator=g)
        self.label = torch.randint(0, classes, (rows,), generator=g)
        self.value = torch.randn(rows, generator=g)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"ids": self.ids[i], "ids2": self.ids2[i], "label": self.label[i], "value": self.value[i]}
