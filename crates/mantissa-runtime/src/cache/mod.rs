//! Paged KV cache: blocks, block tables, storage schemes, and attention that reads the packed cache.
