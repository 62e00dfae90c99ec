"""A pool of key/value rows. RoPE is applied before a row is written, so their order is free."""

from __future__ import annotations

import torch
from torch import Tensor

UNCOMMITTED = -1


class KvRows:
    """Keys and values of every layer for `num_rows` rows, and which request owns each row.

    `keys`, `values`: [num_layers, num_rows, num_kv_heads, head_dim]; `owner` int64 [num_rows], -1
    while uncommitted; `position` int64 [num_rows]. Rows are handed out and freed by the caller.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_rows, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.owner = torch.full((num_rows,), UNCOMMITTED, dtype=torch.int64, device=device)
        self.position = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.high = 0

    def insert(self, rows: Tensor, positions: Tensor) -> None:
        """Give int64 `rows` [N] to new nodes at `positions` [N]; they start uncommitted."""
        if rows.numel() == 0:
            return
        self.owner[rows] = UNCOMMITTED
        self.position[rows] = positions
        self.high = max(self.high, int(rows.max()) + 1)

    def commit(self, rows: Tensor, requests: Tensor) -> None:
        """The tokens of `rows` [M] became part of the texts of `requests` [M]."""
        self.owner[rows] = requests

    def visible(
        self, rows: Tensor, requests: Tensor, positions: Tensor, ancestors: Tensor
    ) -> Tensor:
        """What each of N nodes may attend to: bool [N, high].

        A node sees its request's committed rows up to its position, its `ancestors` [N, A]
        (-1 pads) and its own row.
        """
        owner, position = self.owner[: self.high], self.position[: self.high]
        seen = (owner == requests.unsqueeze(1)) & (owner != UNCOMMITTED)
        seen &= position <= positions.unsqueeze(1)
        named = torch.cat((ancestors, rows.unsqueeze(1)), dim=1)
        extra = torch.zeros(len(rows), self.high + 1, dtype=torch.bool, device=seen.device)
        extra.scatter_(1, torch.where(named < 0, self.high, named), True)
        return seen | extra[:, : self.high]

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k`, `v` [N, kv_heads, head_dim] of one of this pool's layers."""
        self.keys[layer, rows] = k
        self.values[layer, rows] = v
