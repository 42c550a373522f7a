"""The tensors behind the pages."""

from __future__ import annotations

import torch

from quail.kv.pages import PAGE_TOKENS, PageArena


class KVArena:
    """Keys and values of all layers, in pages; `pages` says who holds which.

    Memory is taken lazily by the operating system, page by page as KV is written, on a CPU.

    Args:
        num_pages: pages there are.
        num_layers: layers of the model.
        num_kv_heads: KV heads a layer.
        head_dim: size of a head.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages = PageArena(num_pages)
        shape = (num_layers, 2, num_pages, PAGE_TOKENS, num_kv_heads, head_dim)
        self._kv = torch.empty(shape, dtype=dtype, device=device)
        self._layers = [(keys, values) for keys, values in self._kv]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(pages, page_tokens, kv_heads, head_dim) keys and values of one layer; views."""
        return self._layers[index]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, touched or not."""
        return self._kv.numel() * self._kv.element_size()
