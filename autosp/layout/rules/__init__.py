"""Rules by operator family; importing this package fills the registry."""

from . import (  # noqa: F401
    attention,
    contraction,
    convolution,
    factory,
    indexing,
    loss,
    pointwise,
    random,
    reduction,
    views,
    vocabulary,
    vocabulary_loss,
)  # fmt: skip
