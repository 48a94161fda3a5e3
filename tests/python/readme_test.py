# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of README.md and docs/python.md print what they show."""
import doctest
import re
import unittest

from support import ROOT


class Blocks(unittest.TestCase):
    def test_print_what_they_show(self):
        for page in ("README.md", "docs/python.md"):
            blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
            self.assertTrue(blocks, page)
            for number, block in enumerate(block for block in blocks if ">>>" in block):  # torch_docs_test.py runs the others
                test = doctest.DocTestParser().get_doctest(block, {}, f"{page}, block {number}", page, 0)
                said = []
                found = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
                self.assertGreater(found.attempted, 1, page)
                self.assertEqual(found.failed, 0, "".join(said))


if __name__ == "__main__":
    unittest.main()
