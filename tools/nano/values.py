"""Random argument values: invented words, names, numbers, codes. Many and diverse, so that the model must copy,
not recall.
"""

from __future__ import annotations

import random
import string

ONSETS = [
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "qu",
    "r",
    "s",
    "sh",
    "sk",
    "st",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "y",
    "z",
]
NUCLEI = ["a", "e", "i", "o", "u", "ai", "ea", "io", "oo", "ou"]
CODAS = ["", "", "l", "m", "n", "r", "s", "t", "x", "nd", "rk", "st"]
FIRST_NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Karim",
    "Lena",
    "Marco",
    "Nadia",
    "Omar",
    "Paula",
    "Quentin",
    "Rosa",
    "Samir",
    "Tara",
    "Uwe",
    "Vera",
    "Wei",
    "Yuki",
    "Zoe",
    "Łukasz",
    "Søren",
    "José",
    "Chloé",
    "Jürgen",
]
CITIES = [
    "Paris",
    "Berlin",
    "Rome",
    "Madrid",
    "Lisbon",
    "Vienna",
    "Oslo",
    "Tokyo",
    "Beijing",
    "Cairo",
    "Nairobi",
    "Lima",
    "Toronto",
    "Boston",
    "Chicago",
    "Sydney",
    "Munich",
    "Hamburg",
    "Zürich",
    "Kraków",
    "Kyoto",
    "Osaka",
    "Mumbai",
    "Porto",
    "Seville",
    "Lyon",
    "Dublin",
    "Athens",
]
NOUNS = [
    "apple",
    "bridge",
    "candle",
    "dragon",
    "engine",
    "forest",
    "garden",
    "harbour",
    "island",
    "jacket",
    "kitchen",
    "lantern",
    "mountain",
    "notebook",
    "orchard",
    "pencil",
    "quarry",
    "river",
    "saddle",
    "tunnel",
    "umbrella",
    "valley",
    "window",
    "yellow",
    "zebra",
    "budget",
    "meeting",
    "report",
    "invoice",
    "holiday",
    "project",
    "recipe",
    "server",
    "printer",
    "battery",
    "ticket",
    "concert",
    "dentist",
    "dinner",
]
VERBS = [
    "buy",
    "call",
    "check",
    "clean",
    "close",
    "deliver",
    "fix",
    "move",
    "open",
    "order",
    "paint",
    "plan",
    "print",
    "repair",
    "send",
    "test",
]
LANGUAGES = ["German", "French", "Spanish", "Italian", "Japanese", "Chinese", "Polish", "Greek", "Turkish", "Korean"]
CURRENCIES = ["EUR", "USD", "GBP", "JPY", "CHF", "SEK", "PLN", "CAD", "AUD", "INR"]


def word(rng: random.Random, syllables: int = 0) -> str:
    """An invented lower-case word of two or three syllables; one in eight is letters at random, so that any can be
    copied."""
    if not syllables and rng.random() < 0.125:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(3, 11)))
    count = syllables or rng.choice((2, 2, 3))
    return "".join(rng.choice(ONSETS) + rng.choice(NUCLEI) + rng.choice(CODAS) for _ in range(count))


def name(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return word(rng).capitalize()
    return rng.choice(FIRST_NAMES) + (" " + word(rng).capitalize() if rng.random() < 0.5 else "")


def place(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else word(rng).capitalize()


def code(rng: random.Random) -> str:
    letters = "".join(rng.choices(string.ascii_uppercase, k=rng.choice((2, 3, 3, 4))))
    return (
        f"{letters}-{rng.randrange(10 ** rng.choice((3, 4, 5, 6))):03d}"
        if rng.random() < 0.6
        else letters + str(rng.randrange(100, 99999))
    )


def phrase(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return f"{rng.choice(VERBS)} the {rng.choice(NOUNS)}"
    if kind < 0.6:
        return f"{rng.choice(VERBS)} the {word(rng)} {rng.choice(NOUNS)}"
    if kind < 0.8:
        return f"{rng.choice(NOUNS)} and {rng.choice(NOUNS)}"
    return " ".join(rng.choice(NOUNS) if rng.random() < 0.5 else word(rng) for _ in range(rng.choice((2, 3))))


def title(rng: random.Random) -> str:
    return f"{word(rng).capitalize()} {rng.choice(NOUNS)}" if rng.random() < 0.5 else phrase(rng).capitalize()


def email(rng: random.Random) -> str:
    return f"{word(rng)}@{word(rng)}.{rng.choice(('com', 'org', 'net', 'de', 'io', 'fr', 'eu'))}"


def path(rng: random.Random) -> str:
    return (
        "/"
        + "/".join(word(rng) for _ in range(rng.choice((1, 2))))
        + f"/{word(rng)}.{rng.choice(('txt', 'md', 'log', 'csv', 'py', 'json', 'cfg'))}"
    )


def date(rng: random.Random) -> str:
    return f"{rng.randrange(2020, 2031)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def integer(rng: random.Random, low: int = 1, high: int = 100) -> int:
    return rng.randrange(low, high)


def amount(rng: random.Random) -> float | int:
    return rng.randrange(1, 2000) if rng.random() < 0.6 else round(rng.uniform(1, 500), rng.choice((1, 2)))
