# SPDX-License-Identifier: Apache-2.0
"""scripts/site: every page of docs/, links and anchors that lead somewhere, no request to another host, a search that works from files.

By the Sphinx of scripts/setup site; without it the pages are not built, and the tests say that they are skipped.
"""
import html.parser
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

from text_test import ROOT

loader = importlib.machinery.SourceFileLoader("site_script", str(ROOT / "scripts/site"))
site = importlib.util.module_from_spec(importlib.util.spec_from_loader("site_script", loader))
loader.exec_module(site)

REPOSITORY = "https://example.org/owner/dynmo"
HERE = "import furo, myst_parser, sphinx"
LIMIT_S = 300  # 30 on a quiet machine
SEARCH = pathlib.Path(__file__).with_name("site_search.js")


def sphinx_is_here():
    pythons = [python for python in (sys.executable, site.CACHE / "site/bin/python") if os.access(python, os.X_OK)]
    return any(subprocess.run([python, "-c", HERE], capture_output=True, check=False).returncode == 0 for python in pythons)


class Page(html.parser.HTMLParser):
    """What a page of HTML asks for, where its links lead, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.requests, self.links, self.anchors = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link":
            self.requests += [given["href"]]
        else:
            self.requests += [given[key] for key in ("src", "srcset", "data", "poster") if given.get(key)]


def is_elsewhere(address):
    return bool(re.match(r"(?:[a-z]+:)?//", address)) and not address.startswith("data:")


@unittest.skipUnless(sphinx_is_here(), "no Sphinx here: scripts/setup site installs it")
class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-site-")
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name) / "site"
        done = subprocess.run([ROOT / "scripts/site", "--repository", REPOSITORY, "--out", cls.folder], capture_output=True, text=True, check=False,
                              timeout=LIMIT_S)
        if done.returncode or done.stderr:
            raise AssertionError(done.stdout + done.stderr)
        cls.pages = {path: Page(path) for path in sorted(cls.folder.rglob("*.html"))}

    def test_has_every_page(self):
        docs = ROOT / "docs"
        wanted = {path.relative_to(docs).with_suffix(".html").as_posix().replace("README.html", "index.html") for path in docs.rglob("*.md")}
        found = {path.relative_to(self.folder).as_posix() for path in self.pages}
        self.assertGreater(len(wanted), 50)
        self.assertEqual(wanted - found, set())

    def test_asks_no_other_host(self):
        asked = [f"{path.name}: {address}" for path, page in self.pages.items() for address in page.requests if is_elsewhere(address)]
        self.assertEqual(asked, [])
        for path in [*self.folder.rglob("*.css"), *self.folder.rglob("*.html")]:
            self.assertEqual([each for each in re.findall(r"url\(\s*['\"]?([^'\")]*)|@import\s+['\"]([^'\"]*)", path.read_text())
                              if is_elsewhere(each[0] or each[1])], [], path)
        for path in self.folder.rglob("*.js"):  # an address in a string; those in comments are no requests
            self.assertEqual(re.findall(r"(?:fetch|import\w*|new \w+|src\s*=|href\s*=)\s*\(?\s*['\"`](?:https?:)?//", path.read_text()), [], path)

    def test_links_lead_somewhere(self):
        for path, page in self.pages.items():
            for link in [*page.links, *page.requests]:
                address = urllib.parse.urlsplit(link)
                if address.scheme or address.netloc or link.startswith("data:"):
                    continue
                target = (path.parent / urllib.parse.unquote(address.path)).resolve() if address.path else path
                self.assertTrue(target.is_file(), f"{path.name}: {link}")
                if address.fragment and target.suffix == ".html":
                    self.assertIn(urllib.parse.unquote(address.fragment), self.pages[target].anchors, f"{path.name}: {link}")

    def test_links_out_of_docs_lead_to_the_tag(self):
        start = re.compile(re.escape(REPOSITORY) + r"/(blob|tree)/v\d+\.\d+\.\d+/([^#]*)")
        found = [start.match(link) for page in self.pages.values() for link in page.links if link.startswith(REPOSITORY)]
        self.assertGreater(len(found), 20)
        for match in found:
            path = ROOT / match.group(2)
            self.assertTrue(path.is_dir() if match.group(1) == "tree" else path.is_file(), match.group(0))

    def test_search_works_from_files(self):
        loaded = [urllib.parse.urlsplit(address).path for address in self.pages[self.folder / "search.html"].requests]
        self.assertIn("searchindex.js", loaded)
        text = (self.folder / "searchindex.js").read_text()
        index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
        numbers = index["terms"]["snapshot"]
        self.assertIn("elasticity", [index["docnames"][number] for number in (numbers if isinstance(numbers, list) else [numbers])])
        node = shutil.which("node")
        if node:  # the scripts of the page, as a browser runs them
            done = subprocess.run([node, SEARCH, "recompute auto"], cwd=self.folder, capture_output=True, text=True, check=False, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("config", json.loads(done.stdout))

    def test_has_the_notices_of_what_it_copies(self):
        for name, words in (("sphinx", "Sphinx team"), ("furo", "Permission is hereby granted")):
            self.assertIn(words, (self.folder / "_static" / f"LICENSE.{name}").read_text())


class Refusals(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-site-")
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name).resolve()
        (self.root / "docs/inner").mkdir(parents=True)
        (self.root / "CMakeLists.txt").write_text("project(x VERSION 0.1.0)\n")
        (self.root / "docs/README.md").write_text("# Index\n\n## Use\n- [page](page.md)\n- [inner](inner/)\n")
        (self.root / "docs/page.md").write_text("# Page\n\n[x](../CMakeLists.txt) [all](../) [index](README.md#use) [here](#page)\n\n```sh\n[a](b.md)\n```\n")
        (self.root / "docs/inner/one.md").write_text("# 1. One\n\n```python\n>>> 1\n1\n```\n")

    def text(self, name):
        return site.page_text(self.root / "docs" / name, self.root / "docs", (REPOSITORY, "v0.1.0"))

    def refused(self, *words, **more):
        done = subprocess.run([ROOT / "scripts/site", *words], capture_output=True, text=True, check=False, timeout=LIMIT_S, env={**os.environ, **more})
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
        return done.stderr

    def test_links_are_those_of_the_site(self):
        self.assertIn(f"[x]({REPOSITORY}/blob/v0.1.0/CMakeLists.txt) [all]({REPOSITORY}/tree/v0.1.0/.) [index](index.md#use) [here](#page)", self.text("page.md"))
        self.assertIn("[a](b.md)", self.text("page.md"), "code is left as it is")
        self.assertIn("[inner](inner/index.md)", self.text("README.md"))
        self.assertIn("```pycon", self.text("inner/one.md"))

    def test_a_link_to_no_file_is_refused(self):
        (self.root / "docs/page.md").write_text("# Page\n\n[x](absent.md)\n")
        with self.assertRaisesRegex(site.Refusal, "docs/page.md: link to absent.md: no such file"):
            self.text("page.md")

    @unittest.skipUnless(sphinx_is_here(), "no Sphinx here: scripts/setup site installs it")
    def test_a_warning_is_refused_and_nothing_is_written(self):
        (self.root / "docs/page.md").write_text("# Page\n\n[x](inner/one.md#nowhere)\n")
        run = f"import sys; sys.path.insert(0, '{pathlib.Path(__file__).parent}'); import site_test as t; " \
              f"t.site.write_site(t.pathlib.Path('{self.root}'), t.pathlib.Path('{self.root}/out'), t.REPOSITORY)"
        python = next(python for python in (site.CACHE / "site/bin/python", sys.executable) if os.access(python, os.X_OK))
        done = subprocess.run([python, "-W", "ignore", "-c", run], capture_output=True, text=True, check=False, timeout=LIMIT_S)
        self.assertRegex(done.stderr, r"Refusal: 1 lines of warnings, the first is 'page.md:\d+: WARNING: .*nowhere")
        self.assertEqual(sorted(path.name for path in self.root.iterdir()), ["CMakeLists.txt", "docs"])

    def test_of_flags_are_one_line(self):
        self.assertIn("--repository is '', wanted an address", self.refused())
        self.assertIn("--repository is 'x y', wanted an address", self.refused("--repository", "x y"))
        self.assertIn("holds other files than a site", self.refused("--repository", REPOSITORY, "--out", self.root))
        if not importlib.util.find_spec("sphinx"):
            self.assertEqual(self.refused("--repository", REPOSITORY, "--out", self.root / "new", DYNMO_CACHE=str(self.root)),
                             "site: no Sphinx here: run scripts/setup site\n")


if __name__ == "__main__":
    sys.exit(unittest.main())
