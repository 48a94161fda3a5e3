# SPDX-License-Identifier: Apache-2.0
"""The page of `dynmo report --html` in a browser: no word on its console, and a mark for each number."""
import json
import re
import unittest

import html_report_test as pages
from browser import MISSING, VEGA, browse, inked
from program import DYNMO
from run_case import RunCase


@unittest.skipIf(MISSING, MISSING)
class HtmlBrowser(RunCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.run_name = pages.HOSTILE
        done = pages.train(cls, cls.run_name)
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)

    def page(self, *runs):
        out = self.folder / "out.html"
        self.succeed([DYNMO, "report", *map(str, runs), "--html", str(out)], env={"DYNMO_VEGA": str(VEGA / "vega.js")})
        return out, json.loads(re.findall(r'id="document">(.*?)</script>', out.read_text(), re.DOTALL)[0])

    def test_shows_every_chart_with_its_marks(self):
        page, document = self.page(self.folder / self.run_name, pages.moved_run(self.folder / "moved"))
        charts = len(document["together"])
        rectangles = 0
        for run in document["runs"]:
            tables = pages.tables_of(run)
            shown = [chart for chart in document["charts"] if tables[chart["tables"][0]]]
            charts += len(shown)
            rectangles += sum(len(tables[chart["tables"][0]]) for chart in shown if '"rect"' in json.dumps(chart["spec"]))
        for dark, ink, other in (False, "#222", "#ddd"), (True, "#ddd", "#222"):
            shown, console = browse(page, "--dump-dom", dark=dark)
            self.assertEqual(console, [])
            self.assertEqual(shown.count("<svg "), charts)
            self.assertEqual(shown.count('aria-roledescription="rect mark"'), rectangles)
            drawn = "".join(re.findall("<svg .*?</svg>", shown, re.DOTALL))
            self.assertIn(f'fill="{ink}"', drawn)
            self.assertNotIn(f'fill="{other}"', drawn)
            self.assertEqual(re.findall("<h2>(.*?)</h2>", shown)[0], "&lt;!--&lt;script&gt;&amp;\"\u2028: static")

    def test_is_not_blank_on_a_screen_a_telephone_and_paper(self):
        page, _ = self.page(pages.moved_run(self.folder / "moved"))
        for width in 1280, 400:
            png = self.folder / f"{width}.png"
            _, console = browse(page, f"--screenshot={png}", "--hide-scrollbars", width=width)
            self.assertEqual(console, [])
            self.assertGreater(inked(png), 0.01)
        pdf = self.folder / "page.pdf"
        _, console = browse(page, f"--print-to-pdf={pdf}", dark=True)
        self.assertEqual(console, [])
        self.assertGreater(len(pdf.read_bytes()), 20_000)

    def test_an_error_would_be_seen(self):
        page, _ = self.page(pages.moved_run(self.folder / "moved"))
        broken = self.folder / "broken.html"
        broken.write_text(page.read_text().replace("const report =", "const reports ="))
        shown, console = browse(broken, "--dump-dom")
        self.assertRegex("\n".join(console), "ReferenceError")
        self.assertEqual(shown.count("<svg "), 0)


if __name__ == "__main__":
    unittest.main()
