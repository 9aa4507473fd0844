"""Tests of the comparison of records: python3 -m unittest discover -s benches"""

import contextlib
import copy
import io
import json
import pathlib
import tempfile
import unittest

import regression

ROWS = {
    "op": "rms_norm",
    "date": "2026-01-01",
    "device": {"name": "GPU"},
    "rows": [
        {"case": "large", "us": {"unsloth": 100.0, "torch": 200.0, "copy": 95.0}},
        {"case": "small", "us": {"unsloth": 2.0, "torch": 4.0}},
        {"case": "not ours", "us": {"torch": 4.0}},
    ],
}
CPU = {
    "date": "2026-01-01",
    "cpu": "CPU",
    "groups": {"linear": {"1x2": {"unsloth": 10.0, "candle": 30.0}}},
}
FORWARD = {
    "date": "2026-01-01",
    "device": {"name": "GPU"},
    "fa3": "3",
    "cells": {"d64": {"hopper": 500.0, "fa3": 490.0, "cudnn": 400.0}},
}
ENGINE = {
    "date": "2026-01-01",
    "device": {"name": "GPU"},
    "model": "m",
    "speed": {
        "bf16": {
            "decode_graph": {"median": 900.0},
            "first_prefill": {"median": 5.0},
            "graph_speed_up": 1.5,
        }
    },
}


def changed(record, *path, to):
    """A copy with one value replaced."""
    made = copy.deepcopy(record)
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return made


class Records(unittest.TestCase):
    def run_on(self, old, new, *arguments, twin=None):
        """(exit status, output) of the comparison of two lists of records."""
        with tempfile.TemporaryDirectory() as folder:
            folders = {}
            for name, records in (("old", old), ("new", new), ("twin", twin or [])):
                folders[name] = pathlib.Path(folder, name)
                folders[name].mkdir()
                for i, record in enumerate(records):
                    (folders[name] / f"{i}.json").write_text(json.dumps(record))
            more = ["--twin", str(folders["twin"])] if twin else []
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said):
                    regression.main([str(folders["old"]), str(folders["new"]), *arguments, *more])
            except SystemExit as stop:
                return stop.code, said.getvalue()
            return 0, said.getvalue()

    def test_the_same_passes(self):
        status, said = self.run_on([ROWS, CPU, FORWARD, ENGINE], [ROWS, CPU, FORWARD, ENGINE])
        self.assertEqual(status, 0)
        self.assertNotIn("lost", said)
        for kind in ("rms_norm", "cpu", "attention_forward", "engine"):
            self.assertIn(f"{kind}, ", said)

    def test_what_is_slower_is_named(self):
        # Times that grow and speeds that fall are both losses.
        slower = [
            (
                ROWS,
                changed(ROWS, "rows", 0, "us", "unsloth", to=110.0),
                "rms_norm, GPU: large: +10.0%",
            ),
            (
                CPU,
                changed(CPU, "groups", "linear", "1x2", "unsloth", to=11.0),
                "cpu, CPU: linear 1x2: +10.0%",
            ),
            (
                FORWARD,
                changed(FORWARD, "cells", "d64", "hopper", to=400.0),
                "attention_forward, GPU: d64: +25.0%",
            ),
            (
                ENGINE,
                changed(ENGINE, "speed", "bf16", "decode_graph", "median", to=600.0),
                "engine, GPU: bf16 decode_graph: +50.0%",
            ),
        ]
        for old, new, expected in slower:
            with self.subTest(expected):
                status, said = self.run_on([old], [new])
                self.assertEqual(status, 1)
                self.assertIn(expected, said)
                self.assertEqual(self.run_on([new], [old])[0], 0)

    def test_noise_is_what_is_said(self):
        new = changed(ROWS, "rows", 0, "us", "unsloth", to=104.0)
        self.assertEqual(self.run_on([ROWS], [new])[0], 1)
        self.assertEqual(self.run_on([ROWS], [new], "--noise", "0.05")[0], 0)

    def test_noise_is_measured_by_a_second_run(self):
        new = changed(ROWS, "rows", 0, "us", "unsloth", to=104.0)
        # A run of the same build that was 5% faster: noise is symmetric.
        twin = changed(ROWS, "rows", 1, "us", "unsloth", to=1.9)
        self.assertEqual(self.run_on([ROWS], [new], twin=[twin])[0], 0)
        self.assertEqual(self.run_on([ROWS], [new], twin=[ROWS])[0], 1)

    def test_a_missing_cell_is_a_loss_and_a_missing_operation_is_not(self):
        status, said = self.run_on([ROWS], [changed(ROWS, "rows", to=ROWS["rows"][:1])])
        self.assertEqual(status, 1)
        self.assertIn("rms_norm, GPU: small: no longer measured", said)
        self.assertEqual(self.run_on([ROWS, CPU], [ROWS])[0], 0)

    def test_devices_are_kept_apart(self):
        other = changed(ROWS, "device", "name", to="other")
        slow = changed(other, "rows", 0, "us", "unsloth", to=200.0)
        self.assertEqual(self.run_on([ROWS, other], [ROWS, slow])[0], 1)
        self.assertIn("in common", self.run_on([ROWS], [slow])[0])

    def test_the_newest_result_counts(self):
        old = changed(changed(ROWS, "rows", 0, "us", "unsloth", to=10.0), "date", to="2025-12-31")
        self.assertEqual(self.run_on([old, ROWS], [ROWS])[0], 0)

    def test_the_others_tell_what_the_machine_did(self):
        new = changed(
            changed(ROWS, "rows", 1, "us", "unsloth", to=3.0), "rows", 1, "us", "torch", to=6.0
        )
        self.assertIn("small: +50.0% (2 -> 3, beside +50.0%)", self.run_on([ROWS], [new])[1])


if __name__ == "__main__":
    unittest.main()
