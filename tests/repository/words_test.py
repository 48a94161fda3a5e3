# SPDX-License-Identifier: Apache-2.0
"""Comments, texts and docs use the words of the field: words.txt lists those they do not use, and a better one each.

A comment of C++ also starts with a subject: none begins with Of, What, Whose or By, and no later sentence with Of, Whose or By.
Comments of headers have short sentences, and those of functions begin with a verb: LIMITS, which only fall. `words_test.py figures` prints them.
"""
import collections
import io
import pathlib
import re
import statistics
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
COMMENT = re.compile(r"\s*//\s?(?!\s*(?:SPDX|NOLINT))(.*)")
ITEM = re.compile(r"^\s*(?:\d+\.|-) ")
SHORT_FORM = re.compile(r"\b(e\.g|i\.e|et al|vs|cf)\. ")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z0-9`\"(\[])")
NO_FUNCTION = re.compile(r"\s*(?:struct|class|enum|union|using|namespace|extern|friend|#|}|$)")
# Plural nouns and other words in -s that begin a comment, but are no verb.
NO_VERB = ("Actions|Always|Bits|Blocks|Bytes|Cosines|Costs|Descriptors|Elements|Entries|Errors|Fields|Gradients|Heads|"
           "Indices|Its|Keys|Layers|Less|Lines|Logits|Matrices|Medians|Members|Messages|Names|Numbers|Offsets|Others|"
           "Parameters|Paths|Plus|Positions|Predictions|Products|Ranges|Ranks|Rows|Samples|Scores|Seconds|Slices|Stages|"
           "States|Steps|Tables|Tasks|Tensors|This|Times|Tokens|Transports|Values|Views|Weights")
VERB = re.compile(rf"(?!(?:{NO_VERB})\b)(?:[A-Z][a-z]+s|Like)\b")
AVOIDED = re.compile(r"\b(who|whoever|somebody|nobody|as many|so many|anew|besides|gone|hears|(?<!in )turns?|the one|the other ones|for want of)\b", re.IGNORECASE)
# No comment of the product has these, of programs that are written about as people.
PEOPLE = re.compile(r"\b(who|whom|whoever|somebody|nobody|anew|hears)\b", re.IGNORECASE)
# Limits of each folder of dynmo/ and apps/, and of all headers together: a few sentences above today's figures, and they only fall. Shares are per cent.
FIGURES = ("median", "above 25 words", "above 30 words", "avoided words", "functions without a verb")
LIMITS = (11, 1.5, 0.7, 1, 3)
LIMITS_OF_ALL = (10, 0.2, 0.1, 2, 0.5)


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


def comment_blocks(text):
    """[(lines of a comment that has lines of its own, code behind it up to the first ; or {)] of a header."""
    found, lines, code = [], [], None
    for line in text.splitlines():
        match = COMMENT.match(line)
        if match:
            lines.append(match.group(1))
        elif lines:
            found.append((lines, [line]))
            lines, code = [], found[-1][1]
        elif code is not None:
            code.append(line)
        if not match and re.search(r"[;{]", line):
            code = None
    return [(block, re.split(r"[;{]", " ".join(code))[0]) for block, code in found]


def is_function(code):
    code = re.sub(r"\[\[\w+\]\]|\btemplate\b", "", code.replace("operator()", "call"))
    for _ in range(4):
        code = re.sub(r"<[^<>]*>", "", code)
    return not NO_FUNCTION.match(code) and bool(re.match(r"[^=(]*[\w\]=<>+-]\(", code))


def sentences(block):
    """The sentences of a comment: empty lines and items of a list end one. Paragraphs that begin with blanks are tables and formulas."""
    paragraphs = [[]]
    for line in block:
        if not line.strip() or ITEM.match(line):
            paragraphs.append([])
        paragraphs[-1].append(line)
    texts = [" ".join(ITEM.sub("", line).strip() for line in lines).strip() for lines in paragraphs
             if not next((line for line in lines if line.strip()), "").startswith("  ")]
    shortened = [SHORT_FORM.sub(lambda m: m.group(1).replace(".", "") + " ", text) for text in texts]
    return [sentence for text in shortened for sentence in SENTENCE_END.split(text) if sentence.strip()]


def figures(headers):
    """FIGURES of the comments in the texts of headers; trailing notes count for the avoided words only."""
    blocks = [block for text in headers for block in comment_blocks(text)]
    lengths = [len(sentence.split()) for lines, _ in blocks for sentence in sentences(lines)] or [0]
    starts = [lines[0] for lines, code in blocks if is_function(code)] or ["Returns"]
    notes = [line.split("//", 1)[1] for text in headers for line in text.splitlines() if "//" in line]
    share = [100 * sum(length > most for length in lengths) / len(lengths) for most in (25, 30)]
    return (statistics.median(lengths), *share, sum(len(AVOIDED.findall(note)) for note in notes),
            100 * sum(not VERB.match(start) for start in starts) / len(starts))


def figures_by_folder():
    """{folder: figures}, and those of all headers as "all"."""
    texts_of = collections.defaultdict(list)
    for name in files():
        if name.suffix == ".h" and name.parts[0] in ("apps", "dynmo"):
            for folder in (name.parts[1], "all"):
                texts_of[folder].append(text_of(name))
    return {folder: figures(headers) for folder, headers in sorted(texts_of.items())}


def people_faults(name, text):
    """Comments of a source, and docstrings, with a word of PEOPLE."""
    if name.suffix == ".py":
        notes = [(number, line) for number, line in python_texts(text) if line.strip().startswith(("#", '"""')) or '"' not in line.replace('"""', "")]
    else:
        notes = [(number, line.split("//", 1)[1]) for number, line in enumerate(text.splitlines(), 1) if "//" in line and '"' not in line]
    return [f"{name}:{number}: '{PEOPLE.search(note).group(0)}': better the program, rank or thread" for number, note in notes if PEOPLE.search(note)]


def figure_faults(folder, found, limits):
    return [f"{folder}: {figure}: {value:.1f}, limit {limit}" for figure, value, limit in zip(FIGURES, found, limits) if value > limit]


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

    def test_of_headers_are_short_sentences_that_begin_with_a_verb(self):
        found = figures_by_folder()
        self.assertGreater(len(found), 20)
        self.assertEqual([line for folder, figures in found.items() for line in figure_faults(folder, figures, LIMITS_OF_ALL if folder == "all" else LIMITS)], [])

    def test_of_the_product_name_no_people(self):
        product = [name for name in files() if name.parts[0] in ("apps", "dynmo", "python") and name.suffix in (*CPP, ".py")]
        self.assertGreater(len(product), 500)
        self.assertEqual("\n".join(line for name in product for line in people_faults(name, text_of(name))), "")
        for name, text in [("a.cpp", "f();  // nobody waits\n"), ("a.py", "# who has ended\n"), ("a.py", '"""Tells\nwho has ended."""\n')]:
            self.assertEqual(len(people_faults(pathlib.Path(name), text)), 1, text)
        self.assertEqual(people_faults(pathlib.Path("a.cpp"), 'say("nobody is there");\n'), [])

    def test_that_count_are_counted(self):
        long_one = "// Returns " + "a " * 26 + "b.\nint f();\n"
        self.assertEqual(figures(["// Returns x. See y.\nint f();\n", "// A stage.\nstruct S {\n  // Its rank.\n  int rank = f(0);  // as many\n"]),
                         (2, 0, 0, 1, 0))
        self.assertEqual(figures(["// The rank.\ntemplate <typename T>\n[[nodiscard]] int f(T x);\n\n// Likes whoever hears.\nint g() {\n"]),
                         (2.5, 0, 0, 2, 50))
        self.assertEqual(figures([long_one, "// 1. One, e.g. 1. two\n// 2. Three\n// four.\n//\n//   x = 1\n//   y = 2\nusing F = int(int);\n"]), (4, 100 / 3, 0, 0, 0))
        self.assertEqual(figure_faults("x", (12, 5, 9, 3, 10), (12, 5, 2.5, 3, 10)), ["x: above 30 words: 9.0, limit 2.5"])


def main():
    if sys.argv[1:] != ["figures"]:
        sys.exit(unittest.main())
    print(f"{'folder':<14}", *(f"{figure:>25}" for figure in FIGURES))
    for folder, found in figures_by_folder().items():
        print(f"{folder:<14}", *(f"{value:>25.1f}" for value in found))


if __name__ == "__main__":
    main()
