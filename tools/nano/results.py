"""What the fixed tools answer: for each, (result, the sentence that uses it), from random values and the arguments."""

from __future__ import annotations

import json
import random
from typing import Any

from . import values as v

Rng = random.Random


def as_json(**kw: Any) -> str:
    return json.dumps(kw, ensure_ascii=False)


def weather(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    sky, deg = r.choice(("clear", "cloudy", "rainy", "sunny", "windy", "snowy")), r.randrange(-9, 36)
    return f"{deg}C, {sky}", f"It is {deg} degrees Celsius and {sky} in {a['city']}."


def local_time(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    now = v.clock(r)
    return now, f"It is {now} in {a['city']}."


def convert(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    out = round(r.uniform(1, 900), 2)
    return as_json(result=out), f"{a['amount']} {a['source']} is {out} {a['target']}."


def email(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    return "sent", f"The email to {a['to']} was sent. 📧"


def event(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    ident = v.code(r)
    return as_json(id=ident), f"The event {a['title']} on {a['date']} was created as {ident}."


def search(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    hit = v.title(r)
    return as_json(top=hit), f"The best result for {a['query']} is {hit}."


def timer(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    return "ok", f"The timer is set to {a['minutes']} minutes. ⏰"


def add(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    return str(a["a"] + a["b"]), f"The sum is {a['a'] + a['b']}."


def translate(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    out = f"{v.word(r)} {v.word(r)}"
    return out, f"In {a['language']} that is: {out}"


def stock(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    price = round(r.uniform(1, 900), 2)
    return as_json(price=price), f"{a['symbol']} trades at {price}."


def book(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    ident = v.code(r)
    return as_json(booking=ident), f"A table for {a['people']} at {a['restaurant']} is booked. The number is {ident}."


def light(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    return "ok", f"The light in the {a['room']} is now {'on' if a['on'] else 'off'}. 💡"


def thermostat(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    return "ok", f"The {a['room']} is set to {a['degrees']} degrees."


def read(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    text = v.phrase(r)
    return text, f"The file {a['path']} says: {text}"


def note(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    return "saved", f"The note {a['title']} was saved. 📝"


def user(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    who = v.name(r)
    return as_json(name=who), f"User {a['user_id']} is {who}."


def parcel(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    where = v.place(r)
    return as_json(location=where), f"The parcel {a['code']} is in {where}. 📦"


def distance(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    km = r.randrange(5, 9000)
    return f"{km} km", f"It is {km} km from {a['start']} to {a['end']}."


def play(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    return "playing", f"Now playing {a['song']} by {a['artist']}. 🎵"


def tags(r: Rng, a: dict[str, Any]) -> tuple[str, str]:
    return "ok", f"The tags {', '.join(a['tags'])} were added to {a['item']}."
