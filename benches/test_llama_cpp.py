"""The comparison with llama.cpp, of programs that only say what they measured."""

import argparse
import json
import pathlib
import unittest
from unittest import mock

import llama_cpp

RECORDS = pathlib.Path(__file__).resolve().parent / "results"


def answer(*command):
    """Ours is twice as fast as theirs, of one sequence and of several; prompts by 8 bits are three times as fast, and what is
    decoded by them 2.2 times."""
    command = list(map(str, command))
    after = lambda flag, absent: command[command.index(flag) + 1] if flag in command else absent
    if command[0] == "engine":
        of_8_bits = "--int8-activations" in command
        rate = (110 if of_8_bits else 100) * int(after("--sequences", "1"))
        prefill = 1500 if of_8_bits else 1000
        return json.dumps({"prompt_tokens": [1], "decode_tokens_per_second": rate, "prefill_tokens_per_second": prefill})
    if command[0] == "llama-batched-bench":
        sequences = int(after("-npl", ""))
        return "a line of its log\n" + json.dumps({"pl": sequences, "speed_tg": 50 * sequences}) + "\n"
    return json.dumps([{"avg_ts": 500 if after("-n", "") == "0" else 50}])


def record(batches, vectors="cpu"):
    arguments = argparse.Namespace(
        engine="engine", llama_bench="llama-bench", llama_batched_bench="llama-batched-bench", threads=2, rounds=2,
        device="cpu", dtype=None, repeats=1, batches=batches,
    )
    processor = mock.patch.object(llama_cpp, "vectors", lambda: vectors)
    with processor, mock.patch.object(llama_cpp, "output", answer):
        measured = llama_cpp.measure(arguments, pathlib.Path(__file__))
    return {"date": "D", "processor": "P", "threads": 2, "llama.cpp": "V", "files": {"model": measured}}


class LlamaCpp(unittest.TestCase):
    def test_batches_have_columns_of_their_own(self):
        found = record([8, 64])
        self.assertEqual(found["files"]["model"]["unsloth"]["decode x8"], {"median": 800, "all": [800, 800]})
        self.assertEqual(found["files"]["model"]["ratio"], {"decode": 2, "decode x8": 2, "decode x64": 2, "prefill": 3})
        head, _, row = llama_cpp.section(found).splitlines()[-3:]
        columns = "decoding | llama.cpp |  | decoding x8 | llama.cpp |  | decoding x64 | llama.cpp |  | prefill"
        self.assertIn(columns, head)
        self.assertIn("| 6,400.0 | 3,200.0 | 2.00× | 1,000.0 | 1,500.0 | 500.0 | 3.00× |", row)

    def test_avx2_decodes_by_8_bits_too(self):
        found = record([8], "avx2")
        self.assertEqual(found["files"]["model"]["ratio"], {"decode": 2.2, "decode x8": 2, "prefill": 3})
        head, _, row = llama_cpp.section(found).splitlines()[-3:]
        self.assertIn("| decoding | unsloth, 8 bits | llama.cpp |  | decoding x8 | llama.cpp |  | prefill |", head)
        self.assertIn("| 100.0 | 110.0 | 50.0 | 2.20× | 800.0 | 400.0 | 2.00× |", row)

    def test_prompts_of_other_lengths_are_told(self):
        files = {"a": {"prompt_tokens": 2137}, "b": {"prompt_tokens": 535}, "c": {"prompt_tokens": 2137}}
        self.assertEqual(llama_cpp.prompts(files), "2,137, 535 (b)")

    def test_there_are_none_without_batches(self):
        self.assertNotIn(" x", llama_cpp.section(record([])))

    def test_records_are_tables(self):
        for path in RECORDS.glob("llama_cpp_*.json"):
            with self.subTest(path.name):
                lines = llama_cpp.section(json.loads(path.read_text())).splitlines()
                self.assertEqual(len({line.count("|") for line in lines if line.startswith("|")}), 1)


if __name__ == "__main__":
    unittest.main()
