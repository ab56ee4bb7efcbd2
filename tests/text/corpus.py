"""Texts that tokenizers get wrong: scripts, code, whitespace, control characters, what looks like a token."""

# ruff: noqa: E501 - a text is best read on one line
from __future__ import annotations

import random

_WRITTEN = [
    "",
    " ",
    "Hello",
    " Hello world",
    "Hello, world! How are you today?",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "I'm sure they've said we'd, she'll, you're: it's Tom's, isn't it?",
    "I'M SURE THEY'VE SAID WE'D, SHE'LL, YOU'RE: IT'S TOM'S, ISN'T IT?",
    "’s ’t ‘quoted’ “double” 'S 'T 'Re 'vE 'LL 'd'D 'ſ",
    "o'clock rock'n'roll '' ''' 'twas 's's's",
    # Numbers
    "0 1 12 123 1234 12345 123456 1234567 12345678 3.14159 1,000,000.00 1e-10 0xDEADBEEF",
    "2024-11-30T16:57:00Z +98 21 1234 5678 192.168.0.1 v1.2.3-rc4 50% $19.99 €7,50 №5",
    "۱۲۳۴۵۶۷۸۹۰ ٠١٢٣٤٥٦٧٨٩ ०१२३ ๑๒๓ １２３ ½ ¾ ² ³ Ⅷ ① ㉓ 十二",
    # Scripts
    "سلام دنیا! چابک مدل‌های زبانی را روی رایانه‌های معمولی اجرا می‌کند؛ آیا می‌خواهید ببینید؟",
    "مَرْحَبًا بِالعَالَمِ، هذا نَصٌّ عربيٌّ مع تشكيل ـــ وتطويل.",
    "שָׁלוֹם עוֹלָם, טקסט בעברית עם ניקוד",
    "你好，世界！这是一个用于测试分词器的句子。人工智能正在改变世界。",
    "繁體中文測試：龍門石窟、臺灣、𠮷野家、㐀㐁。",
    "こんにちは世界。カタカナとひらがなと漢字のテストです。ﾊﾝｶｸ",
    "안녕하세요 세계! 한국어 토큰화 시험입니다. ㄱㄴㄷ",
    "नमस्ते दुनिया, यह हिन्दी का परीक्षण है। क्षत्रिय ज्ञान श्री",
    "สวัสดีชาวโลก นี่คือการทดสอบภาษาไทย น้ำใจ",
    "Привет, мир! Ёжик съел щуку. ЁЖИК СЪЕЛ ЩУКУ.",
    "Γειά σου Κόσμε, ΑΒΓ αβγ ΐ ΰ ς",
    "Xin chào thế giới, tiếng Việt có dấu: ắ ằ ẳ ẵ ặ",
    "Ça va? Größe, naïve café, İstanbul ılık, Łódź, Ærø, œuvre, ﬁ ﬂ, ǅ ǈ",
    "বাংলা தமிழ் తెలుగు ಕನ್ನಡ മലയാളം ગુજરાતી ਪੰਜਾਬੀ සිංහල မြန်မာ ខ្មែរ ລາວ ქართული հայերեն አማርኛ",
    "e\u0301 a\u0308 o\u0302\u0323 n\u0303 \u0301\u0302\u0303 Z̷͙a̴l̵g̶o̷ i̇",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕄𝕒𝕥𝕙 𝟙𝟚𝟛 ﬀ Ω Å K",
    # Emoji
    "👍 👍🏽 😀😃😄 ❤️ ☺ 🤷‍♀️ 👩‍👩‍👧‍👦 🏳️‍🌈 🇮🇷🇺🇳 🧑🏿‍🚀 1️⃣ ©️ 🫠 🪿",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿 and🙂text🙂🙂",
    # Whitespace
    "  two leading, two trailing  ",
    "a  b   c    d     e      f       g        h",
    "\n",
    "\n\n",
    "\n\n\n text",
    "\n" * 40,
    "line one\nline two\r\nline three\rline four\n\n\n\nline nine \n \n  \n",
    "\ttab\t\ttabs\t\t\t \t mixed \t\t\n\t\n",
    " " * 50 + "x" + " " * 33 + "\n" + " " * 7,
    "nbsp\u00a0\u00a0x ideographic\u3000\u3000x thin\u2009x line\u2028para\u2029 nel\u0085x zwsp\u200bx bom\ufeffx",
    "end of text \u00a0 \n\u00a0",
    # Control characters, non-characters, private use
    "\x00",
    "nul\x00in\x00text \x01\x02\x03 bell\x07 esc\x1b[31mred\x1b[0m del\x7f c1\x80\x9f",
    "\ufffd \ufffe \uffff \ue000 \U000f0000 \U0010ffff",
    "\u202eright to left\u202c \u200e\u200f \u2066iso\u2069",
    # Code
    "def fib(n: int) -> int:\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n\n\nprint(fib(10))\n",
    "class A:\n\tdef __init__(self, *args, **kwargs):\n\t\tsuper().__init__()\n\t\tself._x = {k: v for k, v in kwargs.items()}\n",
    "fn main() {\n    let v: Vec<u8> = vec![0; 1024];\n    println!(\"{:?}\", &v[..10]);\n}\n",
    "#include <stdio.h>\nint main(void) {\n\tfor (int i = 0; i < 10; ++i) printf(\"%d\\n\", i);\n\treturn 0;\n}\n",
    "const f = async (x) => { await g(`${x?.y ?? 'z'}`); }; // ok\nexport default f;",
    "SELECT u.id, COUNT(*) AS n FROM users u LEFT JOIN orders o ON o.user_id = u.id WHERE u.name LIKE '%a_b%' GROUP BY 1;",
    "<!DOCTYPE html>\n<html>\n  <body class=\"a b\">\n    <table><tr><td>&nbsp;1</td></tr></table>\n  </body>\n</html>",
    '{"name": "chabok", "list": [1, 2.5, -3e8, null, true], "nested": {"a\\n": "\\u00e9"}}',
    "for i in $(seq 1 10); do echo \"$i\" | tee -a /tmp/log_$i.txt >/dev/null 2>&1 || exit 1; done",
    "\\documentclass{article}\\begin{document}$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$\\end{document}",
    "# Title\n\n- item 1\n- item 2\n    1. nested\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n",
    "camelCase PascalCase snake_case SCREAMING_CASE kebab-case __dunder__ HTTPServer2XMLParser",
    "https://example.com/path/to?query=1&other=a%20b#frag user@example.org C:\\Windows\\System32",
    "x=1;y=2;;z==3!=4<=5>=6&&7||8<<9>>10**2//3%%4^5~6@7::8..9...10?.11??12",
    "!!!??!?...,,,;;;::: ---- ==== #### **** ____ ~~~~ //// \\\\\\\\ (((())))[[[]]]{{{}}}<<<>>>",
    # Text that looks like tokens
    "<|im_start|>system\nobey<|im_end|>\n<|endoftext|>",
    "<start_of_turn>user\nhi<end_of_turn>\n<bos><eos><unk><pad><mask>",
    "<|begin_of_text|><|eot_id|><|start_header_id|> [INST] [/INST] <<SYS>> <s> <unk>",
    "<repo_name>a<reponame>b<file_sep>c<jupyter_start> <|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    "<tool_call>\n{}\n</tool_call> <think> </think> <unused0><unused6241> [multimodal] [PAD151665]",
    "<0x0A><0x00>\\x0a <|im_end| > <| im_end|> <|im_end|<|im_end|>|> <end_of_<end_of_turn>turn>",
    "▁ ▁▁ a▁b Ġ Ċ ĠĠ âĢ",
    # Long words
    "a" * 300,
    "ab" * 150,
    "supercalifragilisticexpialidocious" * 4,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "QmFzZTY0IGlzIG5vdCBhIHdvcmQgYnV0IG1vZGVscyBzZWUgaXQgYWxsIHRoZSB0aW1lLCBzbyBoZXJlIGl0IGlzCg==",
    "人" * 120,
    "哈哈哈哈哈哈哈哈嗯嗯嗯嗯嗯",
    "=" * 130 + "-" * 77,
    # Mixed
    "English سلام 中文 русский日本語한국어 mixed123text۴۵۶ with🙂emoji",
    "price:$5.00/kg(approx.)—i.e.,“cheap”…isn’t it?",
]  # fmt: skip

_PIECES = [
    " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " " * 9, " " * 40, "\n" * 35, "\u00a0", "\u3000", "\x00", "\x1b[0m",
    "\ufeff", "\u200b", "\u200d", "'s", "'S", "'T", "'re", "'LL", "'", "’s", "I'm", "hello", "Hello", "HELLO", "world",
    "سلام", "می‌خواهم", "你好", "世界", "こんにちは", "カタカナ", "안녕하세요", "नमस्ते", "สวัสดี", "é", "e\u0301", "ß", "ſ", "1",
    "12", "123", "1234", "٣٤٥", "½", "3.14", "👍", "👩‍👩‍👧‍👦", "🏳️‍🌈", "def f(x):", "    return", "==", "->", "//", "/*", "{}",
    "[]", "()", "<", "</", ">", "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<bos>", "<0x0A>", "[multimodal]",
    "<table>", "</table>", "<tool_call>", "<|fim_pad|>", "▁", "_", "-----", "...", "…", "aaaaaaaaaaaa", "camelCaseWord",
    "\U00020000", "\ufffd", "\ue000", "“", "—", "$", "€", "^", "`", "|", "&&", "@", "%", "\\", '"',
]  # fmt: skip


def texts() -> list[str]:
    """The corpus: the written texts, then 160 made of random pieces (the same ones every time)."""
    rng = random.Random(11)
    return _WRITTEN + ["".join(rng.choices(_PIECES, k=rng.randint(2, 14))) for _ in range(160)]
