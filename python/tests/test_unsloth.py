"""Tests of the Python module on the CPU: PYTHONPATH=PREFIX/share/unsloth/python python3
python/tests/test_unsloth.py

NumPy is needed; PyTorch and JAX are tested where they are.
"""

import ctypes
import gc
import importlib.util
import unittest

import numpy as np

import unsloth

EPSILON = 1e-5


def norm(x):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)


class Module(unittest.TestCase):
    def setUp(self):
        self.ctx = unsloth.Context(num_threads=1)
        self.addCleanup(self.ctx.close)
        self.x = np.random.default_rng(0).standard_normal((6, 32), np.float32)
        self.out = np.full_like(self.x, np.nan)

    def assert_normal(self, out, x, tolerance=1e-5):
        self.assertLess(np.abs(np.asarray(out, np.float64) - norm(x)).max(), tolerance)

    def test_an_operation(self):
        self.ctx.rms_norm(x=self.x, out=self.out, epsilon=EPSILON)
        self.assert_normal(self.out, self.x)

    def test_strides_are_kept(self):
        self.ctx.rms_norm(x=self.x[::-2][::-1][1:], out=self.out[2::2], epsilon=EPSILON)
        self.assert_normal(self.out[2::2], self.x[3::2])
        self.assertTrue(np.isnan(self.out[1::2]).all())

    def test_read_only_arrays_are_inputs_alone(self):
        self.x.setflags(write=False)
        self.ctx.rms_norm(x=self.x, out=self.out, epsilon=EPSILON)
        self.assert_normal(self.out, self.x)
        with self.assertRaisesRegex(unsloth.Error, "^out: .*read-only"):
            self.ctx.rms_norm(x=self.out, out=self.x, epsilon=EPSILON)

    def test_refusals_name_what_is_wrong(self):
        with self.assertRaisesRegex(unsloth.Error, "out") as raised:
            self.ctx.rms_norm(x=self.x, out=self.out[:3], epsilon=EPSILON)
        self.assertEqual(raised.exception.status, "UNSLOTH_STATUS_INVALID_ARGUMENT")
        with self.assertRaisesRegex(unsloth.Error, "^x: .*dtype"):
            self.ctx.rms_norm(x=self.x.astype(np.float64), out=self.out, epsilon=EPSILON)
        with self.assertRaisesRegex(AttributeError, "has no field wait; it has struct_size"):
            self.ctx.rms_norm(x=self.x, wait=self.x)
        with self.assertRaisesRegex(AttributeError, "no operation rms_nrom"):
            self.ctx.rms_nrom(x=self.x)
        with self.assertRaises(unsloth.Error):
            self.ctx.library.call("context_create", None, None)

    def test_structs_inside_structs(self):
        q = np.ones((1, 3, 2, 8), np.float32)
        self.ctx.rope(q=q, q_out=q, rotation={"theta": 100.0})
        self.assertTrue((q[:, 0] == 1).all())
        self.assertAlmostEqual(float(q[0, 1, 0, 0]), np.cos(1) - np.sin(1), places=6)

    def test_a_layer_is_divided_among_a_group(self):
        library = self.ctx.library
        byref = unsloth.ctypes.byref
        params, comm = library.struct("comm_params", size=1), unsloth.ctypes.c_void_p()
        library.call("comm_id_create", byref(library.struct("comm_id_params")), byref(params.id))
        library.call("comm_create", self.ctx.handle, byref(params), byref(comm))
        weight = np.ones((3, self.x.shape[1]), np.float32)
        out = np.empty((len(self.x), 3), np.float32)
        parallel = {"comm": comm.value, "partition": 1}
        self.ctx.linear(x=self.x, weight=weight, out=out, parallel=parallel)
        self.assertLess(np.abs(out - self.x @ weight.T).max(), 1e-3)
        library.call("comm_destroy", comm)

    def test_a_function_runs_again_and_keeps_its_tensors(self):
        x, out = self.x.copy(), self.out
        run = self.ctx.op("rms_norm", x=x, out=out, epsilon=EPSILON)
        address = x.ctypes.data
        del x
        gc.collect()
        run()
        self.assertEqual(run.params.x.data, address)
        self.assert_normal(out, self.x)
        out[:] = np.nan
        run()
        self.assert_normal(out, self.x)

    def test_fields_may_be_named_like_arguments(self):
        library = self.ctx.library
        kind, identity = library.constants["COMM_KIND_LOCAL"], library.structs["unsloth_comm_id"]()
        wanted = library.struct("comm_id_params", kind=kind)
        library.call("comm_id_create", ctypes.byref(wanted), ctypes.byref(identity))
        params = library.struct("comm_params", kind=kind, size=1, id=identity)
        comm = ctypes.c_void_p()
        library.call("comm_create", self.ctx.handle, ctypes.byref(params), ctypes.byref(comm))
        x, out = np.arange(6, dtype=np.float32), np.empty(6, np.float32)
        self.ctx.all_reduce(comm=comm.value, op=library.constants["REDUCE_OP_MAX"], x=x, out=out)
        library.call("comm_destroy", comm)
        np.testing.assert_array_equal(out, x)

    def test_a_workspace_is_made_where_one_is_needed(self):
        tokens, hidden, inner = 3, 16, 24
        random = np.random.default_rng(1)
        x = random.standard_normal((tokens, hidden), np.float32)
        gate, up, down = (
            random.standard_normal(s, np.float32)
            for s in ((inner, hidden), (inner, hidden), (hidden, inner))
        )
        out = np.empty_like(x)
        self.ctx.mlp(x=x, gate_weight=gate, up_weight=up, down_weight=down, out=out)
        h = x @ gate.T
        expected = (h / (1 + np.exp(-h)) * (x @ up.T)) @ down.T
        self.assertLess(np.abs(out - expected).max(), 1e-4 * np.abs(expected).max())
        self.assertGreaterEqual(self.ctx.workspace_size, tokens * inner * 4)
        stats = self.ctx.library.struct("memory_stats")
        self.ctx.library.call("memory_stats_get", self.ctx.handle, unsloth.ctypes.byref(stats))
        self.assertEqual(stats.in_use, self.ctx.workspace_size)

    def test_a_context_on_the_cpu_takes_no_memory_of_a_gpu(self):
        class Elsewhere:
            def __dlpack__(self, **_):
                return capsule

            def __dlpack_device__(self):
                return 1, 0

        capsule = self.x.__dlpack__()
        with self.assertRaisesRegex(unsloth.Error, "device 1, the CUDA backend"):
            self.ctx.library.tensor(Elsewhere(), backend="CUDA")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "PyTorch is not here")
    def test_tensors_of_pytorch(self):
        import torch

        x = torch.randn(6, 32, dtype=torch.bfloat16, requires_grad=True)
        out = torch.empty_like(x)
        self.ctx.rms_norm(x=x, out=out, epsilon=EPSILON)
        self.assert_normal(out.detach().float(), x.detach().float(), 2e-2)

    @unittest.skipUnless(importlib.util.find_spec("jax"), "JAX is not here")
    def test_arrays_of_jax(self):
        import jax.numpy as jnp

        x = jnp.asarray(self.x)
        self.ctx.rms_norm(x=x, out=self.out, epsilon=EPSILON)
        self.assert_normal(self.out, self.x)


if __name__ == "__main__":
    unittest.main()
