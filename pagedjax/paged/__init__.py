"""The device side: pages, block tables, and attention through them. Everything here is traced."""

from pagedjax.paged.attention import (
    AttentionSpec,
    Placement,
    causal_attention,
    copy_blocks,
    default_placement,
    write_and_attend,
)
from pagedjax.paged.block_tables import Batch, make_batch, update_block_tables
from pagedjax.paged.pages import HEADS_AXIS, CacheLayer, PagesSpec

__all__ = [
    "HEADS_AXIS",
    "AttentionSpec",
    "Batch",
    "CacheLayer",
    "PagesSpec",
    "Placement",
    "causal_attention",
    "copy_blocks",
    "default_placement",
    "make_batch",
    "update_block_tables",
    "write_and_attend",
]
