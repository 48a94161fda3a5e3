# SPDX-License-Identifier: Apache-2.0
"""Files of earlier releases, tests/compatibility/VERSION, are read. Files of a later format are refused by its name (docs/stability.md).

A folder stays as its release wrote it. `write` makes the next one.
"""
import pathlib
import re
import shutil
import unittest

from program import DYNMO, FreshFolderCase

RUNTIME = pathlib.Path(DYNMO).with_name("dynmo-runtime")
RELEASES = sorted(path for path in pathlib.Path(__file__).parent.iterdir() if (path / "run").is_dir())
# A command that reads files of a release, what it prints of them, and the file whose format a later version may have raised.
READERS = [
    ("plan run/profile.json --ranks 2", "6 layers on 2 ranks", "run/profile.json"),
    ("plan run/profile.json --ranks 2 --from plan.json", "6 layers on 2 ranks", "plan.json"),
    ("plan run/profile.json --cluster run/cluster.json", "6 layers on 2 ranks", "run/cluster.json"),
    ("report run", "0 layers in 0 migrations", "run/summary.json"),
    ("report run", "0 layers in 0 migrations", "run/records/rank-0.jsonl"),
    ("report run --traffic", "activation", "run/traffic.jsonl"),
    ("trace stats run/load-trace.jsonl", "layer 6, 24 entries", "run/load-trace.jsonl"),
    ("trace gen --like features.json --costs --out made.jsonl", "4 steps, 6 layers", "features.json"),
    ("config run/config.toml", "hidden = 8", None),
    ("data inspect data", "vocabulary 257", "data/dataset.json"),
]
RUNTIME_READERS = [
    ("checkpoint verify run", "all digests match", None),
    ("checkpoint inspect run", "model.embed_tokens.weight", None),
    ("generate run --prompt-tokens 5,17 --tokens 2", "", None),
    ("train --resume --config run/config.toml --data data --out run --steps 6 -n 2", "step     6/6", None),
]
FORMAT = re.compile(r'"(dynmo-[a-z-]+)-\d+"')


class Releases(FreshFolderCase):
    def each_release(self):
        self.assertTrue(RELEASES)
        for release in RELEASES:
            with self.subTest(release=release.name):
                for left in self.folder.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                shutil.copytree(release, self.folder, dirs_exist_ok=True)
                yield release

    def check(self, readers):
        for _ in self.each_release():
            for words, wanted, _ in readers:
                with self.subTest(words=words):
                    result = self.run_program(*words.split())
                    self.assertEqual(result.returncode, 0, result.stderr)
                    self.assertIn(wanted, result.stdout)

    def test_are_read(self):
        self.check(READERS)

    def test_are_continued(self):
        if not RUNTIME.exists():
            self.skipTest("this build has no runtime")
        self.check(RUNTIME_READERS)

    def check_later_format(self, words, path, code):
        text = path.read_text()
        family = FORMAT.search(text).group(1)
        path.write_text(FORMAT.sub(rf'"{family}-99"', text, count=1))
        self.assert_error(self.run_program(*words.split()), code, f"{family}-99", f"wanted '{family}-")
        path.write_text(text)

    def test_of_a_later_format_are_refused_by_its_name(self):
        for _ in self.each_release():
            for words, _, name in READERS:
                if name is not None:
                    with self.subTest(name=name):
                        self.check_later_format(words, self.folder / name, 2)
            if RUNTIME.exists():
                self.check_later_format("checkpoint verify run", next(self.folder.glob("run/checkpoints/*/manifest.json")), 4)


if __name__ == "__main__":
    unittest.main()
