"""The model of Lightning's memory table: its demo `Transformer`, 32 + 32 layers 1024 wide, 1,008,763,390 weights.

(lightning/pytorch/demos/transformer.py: torch.nn.Transformer between an embedding and a linear layer, log-softmax and
NLL outside.) No configuration describes it, so its layers are recorded here, at the table's one row of 35 tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_fsdp.prediction.memory import Block, Event, ModelShape, Parameter, ParameterKind, Size, Tape, Tapes
from accel_fsdp.prediction.tracing import RecordedRun, Watch, record_run

NAME = "Lightning-1B-demo"
VOCAB, WIDTH, INNER, HEADS, LAYERS, TOKENS, DROPOUT = 33278, 1024, 4096, 64, 32, 35, 0.2


def shape_and_tapes() -> tuple[ModelShape, Tapes]:
    """What `predict` needs."""
    mode = FakeTensorMode()
    with mode:
        options = {"dim_feedforward": INNER, "dropout": DROPOUT, "batch_first": True}
        encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, **options)  # type: ignore[arg-type]
        decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, **options)  # type: ignore[arg-type]
        embedding, norm, head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        hidden = torch.empty(1, TOKENS, WIDTH)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)

        def loss(x: Tensor) -> Tensor:
            log_probabilities = nn.functional.log_softmax(head(norm(x)), dim=-1).view(-1, VOCAB)
            return nn.functional.nll_loss(log_probabilities, ids.view(-1))

        tapes = Tapes(
            blocks=(
                _tape(encoder, hidden, encoder),
                _tape(decoder, hidden, lambda x: decoder(x, hidden)),
            ),
            masked=(None, None),
            embedding=_tape(embedding, None, lambda _: nn.functional.dropout(embedding(ids) * 32.0, DROPOUT)),
            head=_tape(nn.ModuleList([norm, head]), hidden, loss),
        )
        return _shape(encoder, decoder, nn.ModuleList([embedding, norm, norm, head])), tapes


def _tape(module: nn.Module, like: Tensor | None, forward: Callable[[Any], Any]) -> Tape:
    def call(watch: Watch, given: Callable[[], Tensor]) -> Any:
        watch.start()
        return forward(given() if like is not None else None)

    raw: RecordedRun = record_run(call, like, module)
    sides = [tuple(Event(sign, Size(fixed=size)) for sign, size in side) for side in (raw.forward, raw.backward)]
    return Tape(sides[0], sides[1], Size(fixed=raw.output), raw.keeps_input)


def _shape(encoder: nn.Module, decoder: nn.Module, outer: nn.Module) -> ModelShape:
    def parameters(module: nn.Module, kind: ParameterKind) -> tuple[Parameter, ...]:
        return tuple(Parameter(name, tuple(each.shape), kind) for name, each in module.named_parameters())

    final = Parameter("norm", (2 * WIDTH,), "norm")  # the encoder's has a second one
    return ModelShape(
        name=NAME,
        model_type="lightning_demo",
        hidden=WIDTH,
        vocab=VOCAB,
        heads=HEADS,
        head_dim=WIDTH // HEADS,
        blocks=(
            Block("TransformerEncoderLayer", tuple(range(LAYERS)), parameters(encoder, "other")),
            Block("TransformerDecoderLayer", tuple(range(LAYERS, 2 * LAYERS)), parameters(decoder, "other")),
        ),
        outer=(*parameters(outer, "other"), final),
        tied=False,
    )
