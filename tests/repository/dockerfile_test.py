# SPDX-License-Identifier: Apache-2.0
"""scripts/dockerfile_steps.py: the steps of a Dockerfile and what it refuses; scripts/image-stages: what a COPY copies."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

from text_test import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import dockerfile_steps  # noqa: E402

TWO_STAGES = r"""# A comment.
ARG BASE=debian:12-slim
ARG LEVEL=2

FROM ${BASE} AS build
ARG LEVEL
ENV ONE=1 TWO="$LEVEL more"
WORKDIR place
RUN first && \
    # between two lines
    second "$HOME" \

    third
COPY a b c/

FROM build
USER some
ENTRYPOINT ["dynmo", "plan"]
"""


class Steps(unittest.TestCase):
    def test_of_two_stages(self):
        self.assertEqual(dockerfile_steps.steps(TWO_STAGES, {"BASE": "base"}), [
            ["stage", "build", "base"],
            ["folder", "build", "/place"],
            ["run", "build", "root", "/place", 'first &&     second "$HOME"     third', "LEVEL=2", "ONE=1", "TWO=2 more"],
            ["copy", "build", "", "/place/c/", "a", "b"],
            ["image", "build", "[]", "root", "/place", "ONE=1", "TWO=2 more"],
            ["stage", "1", "build"],
            ["image", "1", "[dynmo plan]", "some", "/place", "ONE=1", "TWO=2 more"]])

    def test_arguments_that_are_given(self):
        text = "ARG BASE\nFROM $BASE\nARG A=1\nARG B\nARG C\nRUN true\n"
        self.assertEqual(dockerfile_steps.steps(text, {"BASE": "base", "A": "2", "C": ""})[1], ["run", "0", "root", "/", "true", "A=2", "C="])

    def test_a_later_stage_leaves_an_earlier_one_as_it_is(self):
        found = dockerfile_steps.steps("FROM base AS one\nENV A=1\nFROM one AS two\nENV A=2 B=3\nFROM one\n", {})
        self.assertEqual([step[1:] for step in found if step[0] == "image"],
                         [["one", "[]", "root", "/", "A=1"], ["two", "[]", "root", "/", "A=2", "B=3"], ["2", "[]", "root", "/", "A=1"]])

    def test_destinations(self):
        for given, wanted in (("/a", "/a"), ("/a/", "/a/"), ("b/../c", "/w/c"), (".", "/w/"), ("./", "/w/"), ("/", "/")):
            self.assertEqual(dockerfile_steps.steps(f"FROM base\nWORKDIR /w\nCOPY x {given}\n", {})[2][3], wanted, given)

    def test_of_the_repository(self):
        found = dockerfile_steps.steps((ROOT / "Dockerfile").read_text(), {"BASE": "base"})
        images = {step[1]: step[2:] for step in found if step[0] == "image"}
        self.assertEqual(images["core"], ["[dynmo]", "dynmo", "/home/dynmo"])
        self.assertEqual(images["2"], ["[dynmo]", "dynmo", "/home/dynmo", "DYNMO_TORCH_DIR=/opt/torch/torch"])
        self.assertIn(["copy", "core", "build", "/tmp/", "/image/*.deb"], found)

    def test_refusals(self):
        known = "wanted one of ARG, COPY, ENTRYPOINT, ENV, FROM, RUN, USER, WORKDIR"
        for text, wanted in (
                ("FROM base\n\nADD a b\n", f":3: ADD is not carried out here, {known}"),
                ("FROM base\nRUN true\nHEALTHCHECK NONE\n", f":3: HEALTHCHECK is not carried out here, {known}"),
                ("# escape=`\nFROM base\n", f":1: # escape=` is not carried out here, {known}"),
                ("FROM debian:12\n", ":1: FROM 'debian:12' is not there, wanted an earlier stage or base"),
                ("FROM --platform=linux/arm64 base\n", ":1: FROM '--platform=linux/arm64 base' is not carried out here, wanted IMAGE or IMAGE AS NAME"),
                ("FROM base AS a\nFROM base AS a\n", ":2: FROM 'a' is no name for a stage, wanted a new one"),
                ("RUN true\n", ":1: RUN stands before FROM"),
                ("FROM base\nRUN --mount=type=cache,target=/x true\n", ":2: RUN '--mount=type=cache,target=/x true' is not carried out here"),
                ('FROM base\nRUN ["true"]\n', ":2: RUN '[\"true\"]' is not carried out here"),
                ("FROM base\nRUN <<END\n", ":2: RUN '<<END' is not carried out here"),
                ("FROM base\nCOPY --chown=a x y\n", ":2: COPY '--chown=a x y' is not carried out here"),
                ("FROM base\nCOPY --from=other x y\n", ":2: COPY --from=other is not there, wanted an earlier stage"),
                ("FROM base\nCOPY x y z\n", ":2: COPY 'x y z' is not carried out here: several sources want a destination that ends in /"),
                ("FROM base\nENV A 1\n", ":2: ENV 'A 1' is not read here, wanted NAME=VALUE"),
                ("FROM base\nENV A=${B:-1}\n", ":2: ENV 'A=${B:-1}' is not expanded here, wanted $NAME or ${NAME}"),
                ("FROM base\nENV A='$B'\n", ":2: ENV 'A='$B'' has $ beside quotes, which is not read here"),
                ("FROM base\nUSER 1000:1000\n", ":2: USER '1000:1000' is not carried out here, wanted the name of a user"),
                ("FROM base\nENTRYPOINT dynmo\n", ":2: ENTRYPOINT 'dynmo' is not carried out here, wanted [\"PROGRAM\", ...]"),
                ("FROM base\nRUN true \\\n", ":2: the last instruction ends in \\"),
                ("# Nothing.\n", ": no FROM, wanted a stage")):
            with self.assertRaises(dockerfile_steps.Refusal, msg=text) as raised:
                dockerfile_steps.steps(text, {})
            self.assertTrue(str(raised.exception).startswith(wanted), f"{raised.exception}\n{wanted}")
        with self.assertRaisesRegex(dockerfile_steps.Refusal, "^: no ARG OTHER, which is given$"):
            dockerfile_steps.steps("FROM base\n", {"OTHER": "1"})

    def test_a_refusal_is_one_line(self):
        for words, wanted in (((), "dockerfile_steps: wanted FILE [NAME=VALUE]... (see --help)\n"),
                              (("/no/Dockerfile",), "/no/Dockerfile: No such file or directory\n"),
                              ((ROOT / "Dockerfile",), "Dockerfile:6: FROM 'debian:12-slim' is not there, wanted an earlier stage or base\n")):
            done = subprocess.run([ROOT / "scripts/dockerfile_steps.py", *words], capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (2, "", wanted))


class Copies(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        for name in ("context/a.txt", "context/b.txt", "context/folder/inner/c.txt", "stages/base/old.txt"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(f"{name}\n")
        (self.root / "context/folder/link").symlink_to("inner/c.txt")

    def shell(self, text):
        text = f'set -euo pipefail; stages=$1/stages context=$1/context; source "$2"; stage one base\n{text}'
        return subprocess.run(["bash", "-c", text, "shell", self.root, ROOT / "scripts/image-stages"], capture_output=True, text=True, check=False)

    def files(self, stage):
        folder = self.root / "stages" / stage
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())

    def test_files_and_folders(self):
        done = self.shell("copy one '' /to/ '*.txt'; copy one '' /named a.txt; copy one '' /tree folder; stage two one; copy two one /again /tree/inner")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.files("one"), ["named", "old.txt", "to/a.txt", "to/b.txt", "tree/inner/c.txt", "tree/link"])
        self.assertEqual(self.files("two"), sorted([*self.files("one"), "again/c.txt"]))
        self.assertTrue((self.root / "stages/one/tree/link").is_symlink())
        self.assertEqual(self.files("base"), ["old.txt"])

    def test_the_context_as_a_whole(self):
        self.assertEqual(self.shell("copy one '' /all .").returncode, 0)
        self.assertEqual(self.files("one"), ["all/a.txt", "all/b.txt", "all/folder/inner/c.txt", "all/folder/link", "old.txt"])

    def test_what_is_not_there(self):
        done = self.shell("copy one '' /to/ '*.deb'")
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (1, "image: *.deb is not in the context"))
        done = self.shell("copy one '' /to '*.txt'")
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (1, "image: *.txt is several files, wanted a destination that ends in /"))

    def test_bytes_of_what_a_later_step_removes(self):
        done = self.shell("before=${bytes[one]}; head -c 100000 /dev/zero >$context/large; copy one '' / large; rm $stages/one/large; copy one '' / a.txt\n"
                          "echo $((bytes[one] - before))")
        self.assertGreaterEqual(int(done.stdout.split()[-1]), 100000, done.stderr)


if __name__ == "__main__":
    sys.exit(unittest.main())
