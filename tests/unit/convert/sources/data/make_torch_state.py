"""Makes torch_state.bin beside it, with torch (2.13 was used): python make_torch_state.py"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
state = OrderedDict(
    whole=base,
    transposed=base.t(),
    corner=base[1:3, 2:5],
    every_second=base[:, ::2],
    half=base.half(),
    brain=base.bfloat16(),
    double=base.double() / 3,
    table=torch.arange(5),
    mask=torch.tensor([True, False]),
    scalar=torch.tensor(2.5),
    empty=torch.zeros(0, 3),
)
state._metadata = OrderedDict({"": {"version": 1}})
torch.save(state, Path(__file__).with_name("torch_state.bin"))
