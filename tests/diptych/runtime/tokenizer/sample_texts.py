"""Texts on which tokenizers are compared: prose, code, scripts, emoji, numbers, spaces within and before."""

from __future__ import annotations

import random
from typing import Final

_BASES: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "hello",
    "Hello, World! It's 10:45 o'clock; I'LL be there, WE'VE said so, don't you?",
    "a",
    "I have 3 apples, 12 pears, 123 plums, 1234 nuts and 1234567890 grains of rice.",
    "3.14159e-10, -42, 0x1F, 1_000_000, 50%, $9.99, №5, ½, ²³, Ⅻ, ١٢٣, 一二三",
    "def add(a: int, b: int) -> int:\n    return a + b  # sum\n\n\nif x == 'y':\n\tprint(add(1, 2))",
    "for (int i = 0; i < n; ++i) {\n        sum += x[i] * y[i];\n    }\n",
    '{"name": "Käse", "tags": ["a", "b"], "n": null, "ok": true}',
    '<html><body><h1>Title</h1><p class="x">text</p></body></html>',
    "SELECT * FROM t WHERE id >= 10 AND name LIKE '%ab%' ORDER BY id DESC;",
    'fn main() { println!("{}", x?); } // ok -> Result<(), Box<dyn Error>>',
    "#include <stdio.h>\r\nint main(void)\r\n{\r\n  return 0;\r\n}\r\n",
    "https://example.com/a/b?c=d&e=f#g and /usr/local/bin/python3.11",
    "你好，世界。今天天气很好！",
    "日本語のテキストです。カタカナとひらがな、漢字。",
    "한국어 문장입니다. 안녕하세요?",
    "Привет, мир! Как дела? Ёлка.",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "नमस्ते दुनिया, यह एक परीक्षण है।",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε, ΑΒΓ αβγ",
    "Đây là tiếng Việt có dấu: ế ộ ữ ạ",
    "naïve café, straße, ÆØÅ æøå, Ünïcödé, ﬁ ligature",
    "e\u0301 a\u0308 combined, n\u0303o\u0308",
    "😀😃 👨‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ 🤷‍♂️",
    "mixed 中文 and English和日本語 with emoji😀in the middle",
    "∑∫√∞ ≤≥≠ αβγ → ⇒ ∀x∈ℝ ∃y",
    "tabs\tand\t\tmore\t\t\ttabs",
    "trailing spaces   ",
    "trailing newline\n",
    "a\n\nb\n\n\nc\n\n\n\nd",
    "a \n b  \n  c\n   \n d",
    "x" + " " * 7 + "y" + " " * 16 + "z" + " " * 33 + "end",
    "\n" * 5 + "\t" * 4 + " " * 6,
    "!!!???...;;;:::---___===+++***///\\\\\\|||",
    "a.b.c,d;e:f'g\"h`i~j@k#l$m%n^o&p*q(r)s[t]u{v}w<x>y",
    "CamelCaseWord snake_case_word kebab-case-word SCREAMING_SNAKE XMLHttpRequest iPhone",
    "Supercalifragilisticexpialidocious antidisestablishmentarianism",
    "don't DON'T Don't 's 't 're 've 'm 'll 'd 'S 'T",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ababababababababab",
    "\u00a0non\u00a0breaking\u00a0and\u2003em\u2003space\u200bzero\u3000ideographic",
    "\ufeffbyte order mark",
    "control\x00\x01\x1f\x7fchars",
    "\U0001d54f\U00010348\U000e0041 rare planes \U0010ffff",
    "▁already▁spelled ▁▁ with ▁ marks",
    "<0x0A> <0xFF> is text, Ġ and Ċ too",
    "1. first\n2. second\n   - nested\n   - list\n\n> quote\n\n```python\nx = 1\n```\n",
    "Dr. Smith's e-mail (smith@example.org) isn't re-sent…—“quoted” ‘single’ «guillemets»",
)
_BEGINNINGS: Final = ("", " ", "   ", "\n", "\t ")


def texts() -> list[str]:
    """Return some 300 texts, the same at each call."""
    found = [beginning + base for base in _BASES for beginning in _BEGINNINGS]
    chance = random.Random(40)
    words = [word for base in _BASES for word in base.split(" ") if word]
    for _ in range(50):
        picked = chance.choices(words, k=chance.randint(2, 30))
        found.append("".join(word + chance.choice((" ", " ", " ", "  ", "\n", "", "\t")) for word in picked))
    return found
