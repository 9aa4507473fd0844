"""What the reference is recorded on: prompts to continue, and longer texts to score."""

# name, prompt, whether it is sent as a chat message
PROMPTS = [
    ("capital", "The capital of France is", False),
    ("story", "Once upon a time, in a small village by the sea, there lived", False),
    ("science", "Water boils at 100 degrees Celsius because", False),
    ("digits", "Count: 1, 2, 3, 4, 5, 10, 20, 1234567, 3.14159,", False),
    ("code", "def fibonacci(n):\n    if n < 2:\n        return n\n    return", False),
    ("c_code", "#include <stdio.h>\n\nint main(void) {\n\tprintf(\"%d\\n\", 42);\n", False),
    ("accents", "Voilà un café où l'été n'est jamais fini. Le garçon a demandé", False),
    ("scripts", "Привет, мир! 你好，世界。こんにちは。 नमस्ते ٣٤٥ Ⅷ ½", False),
    ("emoji", "I love pizza 🍕 and 👩‍👩‍👧 family time 🇫🇷! My favourite", False),
    ("spaces", "a  b   c\t\td \n\n  e\r\n   f    ", False),
    ("contractions", "They've said it's what we'd've done; I'LL BET YOU'RE sure that", False),
    ("special", "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n", False),
    ("chat_capital", "What is the capital of France?", True),
    ("chat_list", "Name three primary colors.", True),
    ("chat_unicode", "  Translate “naïve café” into English, please 🙂\n", True),
]

# name, text
SCORED = [
    (
        "prose",
        """The lighthouse had been dark for eleven winters when the new keeper came over the causeway \
with a cart, a dog and a box of brass fittings. People in the harbour watched him from behind their \
curtains. Nobody had asked for a keeper, and nobody could say who paid him. He did not seem to mind. \
In the first week he mended the stairs, in the second he cleaned the lens, and on the last night of \
the month a long white beam swept over the roofs of the town and out across the water.

The fishermen were the first to forgive him. Old Marten, who had lost a boat on the western rocks, \
walked up the hill with a basket of smoked eels and sat in the kitchen for an hour without saying a \
word. After that others came. They brought coal, potatoes and news, and they asked questions about \
the machinery, which the keeper answered at length. A lamp, he explained, is a simple thing. What \
matters is the glass around it. The flame gives light in every direction, and nearly all of it is \
wasted on the sky. The lens gathers what would be lost and sends it where somebody needs it.

By spring the harbour had three new boats. The school teacher took her class up the stairs to see \
the lens turn, and one of the children asked whether the light ever grew tired. The keeper thought \
about it for a while. "No," he said, "but I do, and then I listen to the sea, and I remember that it \
has not grown tired either."
""",
    ),
    (
        "code",
        '''import bisect
from dataclasses import dataclass, field


@dataclass
class Interval:
    start: int
    end: int
    tags: list[str] = field(default_factory=list)

    def overlaps(self, other: "Interval") -> bool:
        """Return True if the two half-open intervals share at least one point."""
        return self.start < other.end and other.start < self.end


class Calendar:
    """A set of intervals that do not overlap, kept sorted by their start."""

    def __init__(self) -> None:
        self._intervals: list[Interval] = []

    def add(self, interval: Interval) -> bool:
        index = bisect.bisect_left([i.start for i in self._intervals], interval.start)
        for neighbour in self._intervals[max(0, index - 1) : index + 1]:
            if neighbour.overlaps(interval):
                return False
        self._intervals.insert(index, interval)
        return True

    def __len__(self) -> int:
        return len(self._intervals)


if __name__ == "__main__":
    calendar = Calendar()
    assert calendar.add(Interval(0, 10))
    assert calendar.add(Interval(10, 20, tags=["work"]))
    assert not calendar.add(Interval(15, 25))
    print(f"{len(calendar)} intervals")
''',
    ),
    (
        "mixed",
        """# Reise nach Lissabon – 2024-05-17

| Posten      | Menge | Preis    |
|-------------|------:|---------:|
| Zugfahrt    |     2 |  89,90 € |
| Übernachtung|     3 | 412,50 € |

1. Zuerst fahren wir früh los, gegen 6:45 Uhr, weil der Anschluss in Paris knapp ist.
2. Ensuite, nous prenons le métro jusqu'à la gare d'Austerlitz (environ 25 minutes).
3. Después cruzamos la frontera; ¿quién sabe si el tren llegará a tiempo?

E = mc² and ∑ᵢ xᵢ ≤ √(n·σ²). Emoji: 🚆 ➡️ 🇵🇹 ☀️. Japanese: 東京からリスボンまで. Russian: Всё хорошо.
Phone: +351 21 000 0000; checksum 0xDEADBEEF; version v1.20.3-rc.4; 3/4 + 1/8 = 7/8.
A literal <|im_end|> in a document is text.
""",
    ),
]
