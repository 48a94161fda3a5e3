# SPDX-License-Identifier: Apache-2.0
"""Comments, texts and docs use the words of the field: words.txt lists those they do not use, and a better one each.

A comment of C++ also starts with a subject: none begins with Of, What, Whose or By, and no later sentence with Of, Whose or By.
"""
import io
import pathlib
import re
import sys
import tokenize
import unittest

from text_test import ROOT, files, text_of

WORDS = pathlib.Path(__file__).with_name("words.txt")
OWN = ("LICENSE", "tests/repository/words.txt", "tests/repository/words_test.py")
CPP = (".h", ".cpp", ".cu", ".def")
FRAGMENT = re.compile(r"(Of|What|Whose|By)\b")
LATER = re.compile(r"[.:;)] (Of|Whose|By)\b")
# A comment, a string or a character; what is between them is code. Raw strings come first.
CPP_TOKEN = re.compile(r'R"(\w*)\((?P<raw>.*?)\)\1"|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/|"(?P<string>(?:\\.|[^"\\\n])*)"'
                       r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.DOTALL)


def listed_words():
    """[(expression, better word)] of words.txt, after one of all expressions together, which most lines are asked for alone."""
    rows = [line.split("=>") for line in WORDS.read_text().splitlines() if line and not line.startswith("#")]
    words = [(re.compile(rf"\b(?:{left.strip()})\b", re.IGNORECASE), right.strip()) for left, right in rows]
    return re.compile("|".join(expression.pattern for expression, _ in words), re.IGNORECASE), words


def cpp_texts(text):
    """(line number, text) of each comment and string of C++. Lines of a comment are separate."""
    found = []
    for match in CPP_TOKEN.finditer(text):
        written = next((value for value in (match.group(name) for name in ("raw", "line", "block", "string")) if value is not None), "")
        first = text.count("\n", 0, match.start()) + 1
        found += [(first + offset, line) for offset, line in enumerate(written.split("\n"))]
    return found


def python_texts(text):
    """(line number, text) of each comment and string of Python."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            found += [(token.start[0] + offset, line) for offset, line in enumerate(token.string.split("\n"))]
    return found


def texts(name, text):
    """(line number, text) of all that is written for people in a file; pages and scripts are taken whole."""
    if name.suffix in CPP:
        return cpp_texts(text)
    if name.suffix == ".py":
        return python_texts(text)
    return list(enumerate(text.splitlines(), 1))


def wrapped(lines):
    """Adds to each line the first word of the next one, so that a phrase is found that a line break divides."""
    joined = []
    for index, (number, line) in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else (0, "")
        near = following[0] == number + 1
        joined.append((number, line, re.sub(r"^[\s/#*>|-]*", "", following[1]).split(" ")[0:2] if near else []))
    return joined


def word_faults(name, text, listed):
    found = []
    any_of_them, words = listed
    for number, line, following in wrapped(texts(name, text)):
        longer = f"{line.rstrip()} {' '.join(following)}"
        for expression, better in words if any_of_them.search(longer) else []:
            match = next((m for m in expression.finditer(longer) if m.start() < len(line.rstrip())), None)
            if match:
                found.append(f"{name}:{number}: '{match.group(0)}': better {better}")
    return found


def fragment_faults(name, text):
    """Comments, paragraphs and sentences in them that begin with a word that starts a fragment."""
    found, before = [], None
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"\s*//\s?(.*)", line)
        comment = match.group(1) if match else None
        start = FRAGMENT.match(comment) if comment and not before else None
        later = LATER.search(f"{before[-1:]} {comment}" if before else comment) if comment else None
        if start or later:
            found.append(f"{name}:{number}: a sentence begins with '{(start or later).group(1)}': begin with a subject")
        before = comment
    return found


def faults(name, text, words):
    if str(name) in OWN:
        return []
    return word_faults(name, text, words) + (fragment_faults(name, text) if name.suffix in CPP else [])


class Words(unittest.TestCase):
    def test_of_the_tree_are_those_of_the_field(self):
        words = listed_words()
        self.assertGreater(len(words[1]), 20)
        self.assertEqual("\n".join(line for name in files() for line in faults(name, text_of(name), words)), "")

    def test_that_are_listed_are_found(self):
        words = listed_words()
        for name, text in [("a.h", "int x;  // too dear\n"), ("a.cpp", 'say("it stands by");\n'), ("a.md", "Host numbers are for life."),
                           ("a.h", "// a loss that is no\n// number\n"), ("a.py", "# its affair\n"), ("a.py", '"""The\nDoor."""\n'),
                           ("a.sh", "echo 'as ever'\n"), ("a.cpp", 'R"(by a\ndoor)"\n'), ("a.h", "// What a stage is.\nint x;\n"),
                           ("a.h", "int y;\n  // Of a stage.\n"), ("a.h", "// A stage. Of it.\n"), ("a.h", "// A stage.\n// By rank.\n"), ("a.h", "// A stage.\n//\n// By rank.\n")]:
            self.assertEqual(len(faults(pathlib.Path(name), text, words)), 1, text)

    def test_of_code_and_of_other_meanings_are_not_found(self):
        words = listed_words()
        for name, text in [("a.h", "bool door = dear;  // fine\n"), ("a.cpp", "const int wish = 1'000'000; say(\"x\");\n"),
                           ("a.py", "door = wish  # fine\n"), ("a.h", "// The indoor standard deviation.\n"),
                           ("a.h", "// A stage runs\n// What it has.\n"), ("a.md", "Of two plans the first wins. spec.deviation")]:
            self.assertEqual(faults(pathlib.Path(name), text, words), [], text)


if __name__ == "__main__":
    sys.exit(unittest.main())
