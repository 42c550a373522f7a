"""Arrays arrive on the device as they were, in one copy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quail.kernels.upload import ALIGNMENT_BYTES, side_by_side, upload


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["i4", "i8", "f4", "u1"]), st.lists(st.integers(0, 5), min_size=1, max_size=3)
        ),
        max_size=5,
    )
)
def test_arrays_arrive_as_they_were(kinds):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 100, shape).astype(kind) for kind, shape in kinds]
    cpu = torch.device("cpu")
    for there in (upload(arrays, cpu), side_by_side(arrays, cpu, pinned=False)):
        assert len(there) == len(arrays)
        for tensor, array in zip(there, arrays, strict=True):
            assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)
    base = min((each.data_ptr() for each in there if each.numel()), default=0)
    assert all((each.data_ptr() - base) % ALIGNMENT_BYTES == 0 for each in there if each.numel())
