# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/: links lead somewhere, shell blocks are run by a test, and the pages stay short."""
import pathlib
import re
import sys
import unittest

from text_test import ROOT

MAX_WORDS = 30000  # of docs/*.md, as wc -w counts
# Pages with blocks of ```sh, and the test that runs them.
RUN_BY = {
    "README.md": "tests/docs/readme_test.py",
    "docs/elasticity.md": "tests/docs/shell_test.py",
    "docs/features.md": "tests/docs/shell_test.py",
    "docs/from-hugging-face.md": "tests/docs/readers_test.py",
    "docs/from-megatron.md": "tests/docs/readers_test.py",
    "docs/from-torchtitan.md": "tests/docs/readers_test.py",
    "docs/own-source.md": "tests/repository/install_test.py",
    "docs/scenarios.md": "tests/docs/shell_test.py",
    "docs/training.md": "tests/docs/training_test.py",
}
# Fences: ```sh is run, the others show data, code, what is printed or a syntax.
LANGUAGES = ("sh", "text", "toml", "json", "yaml", "cpp", "python")


def pages():
    names = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    folders = ["docs/*.md", "docs/decisions/*.md", "bench/results/*.md", "tests/elastic/*.md"]
    return [ROOT / name for name in names] + sorted(path for folder in folders for path in ROOT.glob(folder))


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text):
    """What the headings of a page are called in links, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(path, text):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text)):
        name, _, anchor = link.partition("#")
        target = path if not name else path.parent / name
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists():
            broken.append(f"{path.relative_to(ROOT)}: {link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            broken.append(f"{path.relative_to(ROOT)}: {link}: no such heading")
    return broken


def fences(text):
    """The languages of a page's blocks; "" where none is given."""
    return re.findall(r"^```(.*)$", text, re.MULTILINE)[::2]


class Pages(unittest.TestCase):
    def test_link_to_what_is_there(self):
        self.assertEqual([line for path in pages() for line in broken_links(path, path.read_text())], [])

    def test_are_in_the_index(self):
        index = (ROOT / "docs/README.md").read_text()
        names = {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"}
        self.assertEqual([name for name in sorted(names) if f"({name}" not in index], [])
        self.assertIn("(docs/README.md)", (ROOT / "README.md").read_text())

    def test_are_short(self):
        words = {path.name: len(path.read_text().split()) for path in ROOT.glob("docs/*.md")}
        self.assertLessEqual(sum(words.values()), MAX_WORDS, sorted(words.items(), key=lambda item: -item[1]))
        readme = (ROOT / "README.md").read_text().splitlines()
        self.assertLessEqual(len(readme), 120)
        self.assertEqual([line for line in readme if len(line) > 100], [])

    def test_say_what_each_block_is(self):
        found = [f"{path.relative_to(ROOT)}: ```{language}" for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
                 for language in fences(path.read_text()) if language not in LANGUAGES]
        self.assertEqual(found, [])

    def test_have_shell_blocks_that_a_test_runs(self):
        found = {str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")] if "sh" in fences(path.read_text())}
        self.assertEqual(found, set(RUN_BY))
        for page, test in RUN_BY.items():
            self.assertIn(pathlib.Path(page).name, (ROOT / test).read_text(), test)

    def test_name_the_exit_codes_of_the_code(self):
        comment = re.sub(r"\n// ", " ", (ROOT / "dynmo/core/expected.h").read_text())
        codes = re.search(r"exit code: (1 internal, [^.]*)\.", comment).group(1)
        self.assertIn(f"0 done, {codes}.", " ".join((ROOT / "docs/stability.md").read_text().split()))

    def test_that_break_a_rule_are_found(self):
        path = ROOT / "docs/planner.md"
        self.assertEqual(len(broken_links(path, "[a](nowhere.md) [b](#planner) [c](#nowhere) [d](config.md#nowhere) [e](https://x.y)")), 3)
        self.assertEqual(fences("```sh\na\n```\n\n```\nb\n```\n"), ["sh", ""])


if __name__ == "__main__":
    sys.exit(unittest.main())
