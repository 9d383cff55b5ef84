"""Rules by operator family; importing this package fills the registry."""

from . import attention, contraction, factory, indexing, loss, pointwise, random, reduction, views  # noqa: F401
