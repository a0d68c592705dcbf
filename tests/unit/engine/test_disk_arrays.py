"""mlx arrays to the disk tier and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.engine.disk_arrays import restored, stored
from mlxinfer.engine.disk_format import DTYPES
from tests.unit.engine.test_disk import tier

ROOT = Path(__file__).parents[3]


def values(dtype: str) -> mx.array:
    kind = mx.bool_ if dtype == "bool" else getattr(mx, dtype)
    return (mx.arange(48).reshape(2, 3, 8) % 7 - (0 if dtype in ("bool", "uint8") else 3)).astype(kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["whole", "slice", "scalar", "empty", "transposed"])
def test_every_dtype_and_form_comes_back_bit_for_bit(tmp_path, dtype, form):
    whole = values(dtype)
    array = {
        "whole": whole,
        "slice": whole[:, 1:, 2:5],
        "scalar": whole[1, 2, 3],
        "empty": whole[:0],
        "transposed": whole.transpose(2, 0, 1),
    }[form]
    t = tier(tmp_path)
    assert t.write("k", (1,), stored({"a": array, "b": whole}), {})
    found = t.lookup("k", (1,), 1, False)
    assert found is not None
    read = t.read(found[0])
    assert read is not None
    back = restored(read)
    assert (back["a"].dtype, back["a"].shape) == (array.dtype, array.shape)
    assert mx.array_equal(back["a"], array).item()
    assert mx.array_equal(back["b"], whole).item()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_special_values_keep_their_bits(dtype):
    bits = mx.array([0x7F80, 0xFF80, 0x7FC1, 0x8000, 0x0001, 0x7C00, 0x7C01], mx.uint16)
    array = mx.concatenate([bits, bits[:1]]).view(getattr(mx, dtype))
    (one,) = stored({"a": array})
    back = restored([one])["a"]
    np.testing.assert_array_equal(np.asarray(back.view(mx.uint16)), np.asarray(array.view(mx.uint16)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_storing_makes_no_copy_and_restoring_does(dtype):
    array = mx.zeros((1 << 20,), getattr(mx, dtype))
    mx.eval(array)
    before = mx.get_active_memory()
    (one,) = stored({"a": array})
    assert mx.get_active_memory() - before < 1 << 16
    assert not one.data.flags.owndata
    source = np.zeros(4, np.float32)
    back = restored([type(one)("x", "float32", source)])["x"]
    source[0] = 5
    assert back[0].item() == 0


def test_a_dtype_that_no_key_has_is_refused():
    with pytest.raises(ValueError, match="complex64"):
        stored({"a": mx.zeros((2,), mx.complex64)})


ROUNDS = """
import threading, sys
from pathlib import Path
import mlx.core as mx
from mlxinfer.engine.disk import DiskTier
from mlxinfer.engine.disk_arrays import stored
from mlxinfer.engine.disk_writer import DiskJob, DiskWriter

def work():
    tier = DiskTier(Path(sys.argv[1]), "f1", 1 << 20)
    writer = DiskWriter(tier)
    for n in range(200):
        keys = mx.random.normal((1, 2, 64, 16)).astype(mx.bfloat16 if n % 2 else mx.float32)
        arrays = stored({"keys": keys[:, :, : 8 + n % 50], "values": mx.random.normal((4, 4)) + n})
        del keys
        while not writer.submit(DiskJob("k", (n, n), arrays, {})):
            assert writer.flush(30)
        del arrays
        mx.eval(mx.random.normal((64, 64)) @ mx.random.normal((64, 64)))
    assert writer.close(30)
    assert tier.counters.written == 200, tier.counters
    mx.synchronize()
    mx.clear_streams()

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(mx.get_active_memory())
"""


def test_the_writers_thread_may_be_the_last_to_hold_an_array(tmp_path):
    # Two hundred entries whose mlx buffers are let go on a thread that isn't theirs, then a clean exit.
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, str(tmp_path / "cache")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) < 1 << 16
