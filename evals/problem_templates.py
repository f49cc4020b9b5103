"""Grade-school word problems as data: a story, the ranges of its numbers, and the steps that solve it.

In a step, `[total = a * b]` stands for an equation: it is worked out from left to right on the numbers drawn so far,
written as "6 * 4 = 24", and `total` can be used from there on. The last equation is the answer. `evals.problems` draws
the numbers again until every equation gives a whole number above 1, so ranges need not be chosen with care.

`{name}`, `{other}`, `{third}` are three different people; `{they}`, `{They}`, `{their}` belong to the first of them.
"""

from dataclasses import dataclass, field
from typing import Final

__all__ = ["PEOPLE", "TEMPLATES", "Template"]

Range = tuple[int, int] | tuple[int, int, int]  # lowest, highest (included), and the step between them


@dataclass(frozen=True)
class Template:
    """A kind of problem; `words` are interchangeable nouns of the story."""

    name: str
    question: str
    steps: tuple[str, ...]
    numbers: dict[str, Range]
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)


PEOPLE: Final = (
    ("Maria", "she", "her"),
    ("Tom", "he", "his"),
    ("Aisha", "she", "her"),
    ("Daniel", "he", "his"),
    ("Sofia", "she", "her"),
    ("Kenji", "he", "his"),
    ("Olivia", "she", "her"),
    ("Samuel", "he", "his"),
    ("Priya", "she", "her"),
    ("Lukas", "he", "his"),
    ("Hannah", "she", "her"),
    ("Omar", "he", "his"),
    ("Grace", "she", "her"),
    ("Peter", "he", "his"),
    ("Elena", "she", "her"),
    ("Victor", "he", "his"),
)

_SMALL: Final = ("pencils", "marbles", "stickers", "cookies", "shells", "buttons", "beads", "cards")
_GOODS: Final = ("notebooks", "lamps", "scarves", "toy cars", "mugs", "umbrellas", "baskets", "puzzles")
_DEAR: Final = ("bicycle", "camera", "guitar", "tent", "sewing machine", "telescope", "desk", "phone")

TEMPLATES: Final = (
    Template(
        "boxes",
        "{name} buys {a} boxes of {items} with {b} {items} in each box. {They} gives {c} {items} to {other}. "
        "How many {items} does {name} have left?",
        ("{name} buys [total = a * b] {items}.", "After giving some away, {they} has [left = total - c] {items} left."),
        {"a": (3, 15), "b": (4, 24), "c": (5, 60)},
        {"items": _SMALL},
    ),
    Template(
        "wages",
        "{name} earns ${a} an hour and works {b} hours a day for {c} days. Then {they} spends ${d} on a {thing}. "
        "How many dollars does {they} have left?",
        (
            "{name} works [hours = b * c] hours in total.",
            "{They} earns [pay = hours * a] dollars.",
            "After buying the {thing}, {they} has [left = pay - d] dollars left.",
        ),
        {"a": (9, 30), "b": (3, 8), "c": (2, 9), "d": (40, 300)},
        {"thing": _DEAR},
    ),
    Template(
        "discount",
        "{name} chooses {n} {things} that cost ${a} each. The shop takes {p}% off the whole price. "
        "How many dollars does {name} pay?",
        (
            "Without the discount the {things} cost [full = n * a] dollars.",
            "The discount is [off = full * p / 100] dollars.",
            "So {name} pays [price = full - off] dollars.",
        ),
        {"n": (2, 12), "a": (5, 80), "p": (5, 50, 5)},
        {"things": _GOODS},
    ),
    Template(
        "ages",
        "{name} is {k} times as old as {other}, and {other} is {a} years old. {third} is {b} years older than {name}. "
        "How old will {third} be in {c} years?",
        (
            "{name} is [first = a * k] years old.",
            "{third} is [now = first + b] years old.",
            "In {c} years {third} will be [later = now + c] years old.",
        ),
        {"k": (2, 4), "a": (4, 16), "b": (2, 9), "c": (3, 20)},
    ),
    Template(
        "journey",
        "A {vehicle} travels for {a} hours at {u} kilometers per hour and then for {b} hours at {v} kilometers per "
        "hour. How many kilometers does it travel altogether?",
        (
            "In the first part it travels [near = a * u] kilometers.",
            "In the second part it travels [far = b * v] kilometers.",
            "Altogether it travels [way = near + far] kilometers.",
        ),
        {"a": (2, 7), "u": (30, 90, 5), "b": (2, 7), "v": (40, 120, 5)},
        {"vehicle": ("train", "truck", "bus", "car")},
    ),
    Template(
        "sharing",
        "{n} children find {a} bags with {b} {items} in each bag and share all the {items} equally. "
        "How many {items} does each child get?",
        ("There are [total = a * b] {items} in the bags.", "Each child gets [each = total / n] {items}."),
        {"n": (3, 9), "a": (4, 18), "b": (6, 36)},
        {"items": _SMALL},
    ),
    Template(
        "fraction",
        "A school has {a} students. 1/{k} of them walk to school and the others take the bus. "
        "How many more students take the bus than walk?",
        (
            "[walk = a / k] students walk to school.",
            "The number of students who take the bus is [bus = a - walk].",
            "So [more = bus - walk] more students take the bus.",
        ),
        {"a": (90, 900), "k": (3, 9)},
    ),
    Template(
        "reading",
        "{name} reads {a} pages a day from Monday to Friday and {b} pages a day on Saturday and Sunday. "
        "How many pages does {they} read in {w} weeks?",
        (
            "From Monday to Friday {name} reads [weekdays = a * 5] pages.",
            "On the weekend {they} reads [weekend = b * 2] pages.",
            "In one week {they} reads [week = weekdays + weekend] pages.",
            "In {w} weeks {they} reads [pages = week * w] pages.",
        ),
        {"a": (6, 30), "b": (15, 60), "w": (2, 8)},
    ),
    Template(
        "change",
        "{name} buys {a} kilograms of {fruit} at ${p} per kilogram and {b} kilograms of {nuts} at ${q} per kilogram. "
        "{They} pays with ${c}. How many dollars does {they} get back?",
        (
            "The {fruit} cost [one = a * p] dollars.",
            "The {nuts} cost [two = b * q] dollars.",
            "Together this is [bill = one + two] dollars.",
            "{name} gets back [back = c - bill] dollars.",
        ),
        {"a": (2, 9), "p": (2, 7), "b": (2, 6), "q": (6, 15), "c": (50, 200, 50)},
        {"fruit": ("apples", "pears", "plums", "oranges"), "nuts": ("almonds", "walnuts", "cashews")},
    ),
    Template(
        "saving",
        "{name} wants to buy a {thing} for ${a}. {They} already has ${b} and saves ${c} every week. "
        "After how many weeks can {they} buy it?",
        ("{name} still needs [missing = a - b] dollars.", "This takes [weeks = missing / c] weeks."),
        {"a": (120, 600, 5), "b": (20, 110, 5), "c": (5, 40, 5)},
        {"thing": _DEAR},
    ),
    Template(
        "fence",
        "A rectangular {place} is {a} meters long and {b} meters wide. A fence costs ${c} per meter. "
        "How many dollars does a fence around the {place} cost?",
        (
            "The length and the width add up to [half = a + b] meters.",
            "The fence is [around = half * 2] meters long.",
            "It costs [cost = around * c] dollars.",
        ),
        {"a": (15, 60), "b": (6, 40), "c": (4, 25)},
        {"place": ("garden", "field", "yard", "playground")},
    ),
    Template(
        "tiles",
        "A floor is {a} feet long and {b} feet wide. A box of tiles covers {c} square feet and costs ${d}. "
        "How many dollars do the tiles for the whole floor cost?",
        (
            "The floor measures [area = a * b] square feet.",
            "For it one needs [boxes = area / c] boxes.",
            "They cost [cost = boxes * d] dollars.",
        ),
        {"a": (8, 40), "b": (6, 30), "c": (6, 20), "d": (11, 35)},
    ),
    Template(
        "recipe",
        "A recipe for {a} people needs {b} grams of {food}. {name} cooks for {c} people and has {d} grams of {food} at "
        "home. How many more grams does {they} need?",
        (
            "One person needs [one = b / a] grams of {food}.",
            "For {c} people {name} needs [all = one * c] grams.",
            "So {they} needs [more = all - d] more grams.",
        ),
        {"a": (2, 6), "b": (150, 900, 10), "c": (7, 25), "d": (100, 500, 50)},
        {"food": ("rice", "flour", "pasta", "beans")},
    ),
    Template(
        "tank",
        "A tank that holds {a} liters is empty. A pump brings {b} liters of water per minute, but {c} liters leak out "
        "every minute. After how many minutes is the tank full?",
        (
            "Every minute the water in the tank grows by [net = b - c] liters.",
            "The tank is full after [minutes = a / net] minutes.",
        ),
        {"a": (200, 2000, 20), "b": (15, 60), "c": (2, 14)},
    ),
    Template(
        "average",
        "{name} scored {a}, {b} and {c} points in three games. {other} scored {d} points in each game. "
        "By how many points is the average of {name} higher than the average of {other}?",
        (
            "In three games {name} scored [sum = a + b + c] points.",
            "The average of {name} is [mean = sum / 3] points.",
            "It is higher by [more = mean - d] points.",
        ),
        {"a": (20, 60), "b": (20, 60), "c": (20, 60), "d": (8, 30)},
    ),
    Template(
        "fourth-test",
        "{name} wants to reach an average of {m} points over four tests. In the first three tests {they} got {a}, {b} "
        "and {c} points. How many points does {they} need in the fourth test?",
        (
            "Over four tests {name} needs [need = m * 4] points.",
            "So far {they} has [have = a + b + c] points.",
            "In the fourth test {they} needs [last = need - have] points.",
        ),
        {"m": (70, 90), "a": (60, 99), "b": (60, 99), "c": (60, 99)},
    ),
    Template(
        "doubling",
        "A club starts with {a} members. Their number doubles every year for three years, and then {b} members leave. "
        "How many members are left?",
        (
            "After the first year there are [one = a * 2] members.",
            "After the second year there are [two = one * 2] members.",
            "After the third year there are [three = two * 2] members.",
            "When some have left there are [left = three - b] members.",
        ),
        {"a": (6, 80), "b": (5, 90)},
    ),
    Template(
        "race",
        "{name} runs {a} meters per minute and {other} runs {b} meters per minute. They start together. "
        "How many meters is {name} ahead after {t} minutes?",
        (
            "{name} has run [first = a * t] meters.",
            "{other} has run [second = b * t] meters.",
            "{name} is ahead by [ahead = first - second] meters.",
        ),
        {"a": (180, 300, 5), "b": (120, 220, 5), "t": (4, 30)},
    ),
    Template(
        "ratio",
        "In a jar the numbers of red and blue {items} are in the ratio {a} to {b}. There are {n} {items} in the jar. "
        "How many {items} are red?",
        (
            "The ratio has [parts = a + b] parts.",
            "Each part is [part = n / parts] {items}.",
            "There are [red = part * a] red {items}.",
        ),
        {"a": (2, 9), "b": (2, 9), "n": (60, 480)},
        {"items": ("marbles", "beads", "buttons")},
    ),
    Template(
        "minutes",
        "{name} watches {k} episodes of {m} minutes each and a film of {h} hours. "
        "How many minutes does {they} watch in total?",
        (
            "The episodes take [series = k * m] minutes.",
            "The film takes [film = h * 60] minutes.",
            "In total {name} watches [total = series + film] minutes.",
        ),
        {"k": (2, 14), "m": (18, 55), "h": (2, 4)},
    ),
    Template(
        "stock",
        "A shop has {a} crates with {b} bottles in each crate. It sells {c} bottles on Monday and twice as many on "
        "Tuesday. How many bottles are left?",
        (
            "At first the shop has [total = a * b] bottles.",
            "On Tuesday it sells [second = c * 2] bottles.",
            "On both days it sells [sold = c + second] bottles.",
            "There are [left = total - sold] bottles left.",
        ),
        {"a": (8, 30), "b": (6, 24), "c": (10, 90)},
    ),
    Template(
        "bus",
        "A bus starts with {a} passengers. At the first stop {b} passengers get off and {c} get on. At the second stop "
        "half of the passengers get off. How many passengers are still on the bus?",
        (
            "After {b} passengers got off there are [some = a - b] passengers.",
            "After {c} got on there are [many = some + c] passengers.",
            "After the second stop there are [rest = many / 2] passengers.",
        ),
        {"a": (20, 60), "b": (3, 18), "c": (2, 25)},
    ),
    Template(
        "profit",
        "{name} makes {a} {things} to sell at the market. Each costs ${b} to make and is sold for ${c}. The stall "
        "costs ${d}. If {they} sells all of them, what is {their} profit in dollars?",
        (
            "On each piece {name} earns [each = c - b] dollars.",
            "On all {things} {they} earns [gain = each * a] dollars.",
            "After paying for the stall, {their} profit is [profit = gain - d] dollars.",
        ),
        {"a": (12, 60), "b": (3, 12), "c": (8, 30), "d": (10, 90, 5)},
        {"things": _GOODS},
    ),
    Template(
        "orchard",
        "A farmer plants {a} rows of {b} {trees}. {p}% of the {trees} die. Each of the others gives {c} kilograms of "
        "fruit. How many kilograms of fruit does the farmer get?",
        (
            "The farmer plants [planted = a * b] {trees}.",
            "Of these, [dead = planted * p / 100] die.",
            "There remain [alive = planted - dead] {trees}.",
            "They give [fruit = alive * c] kilograms of fruit.",
        ),
        {"a": (5, 30), "b": (8, 40), "p": (5, 40, 5), "c": (6, 30)},
        {"trees": ("apple trees", "pear trees", "cherry trees", "orange trees")},
    ),
    Template(
        "load",
        "An empty truck weighs {a} kilograms. It carries {b} boxes of {c} kilograms each and {d} sacks of {e} "
        "kilograms each. How many kilograms does the loaded truck weigh?",
        (
            "The boxes weigh [boxes = b * c] kilograms.",
            "The sacks weigh [sacks = d * e] kilograms.",
            "The loaded truck weighs [all = a + boxes + sacks] kilograms.",
        ),
        {"a": (1500, 4500, 100), "b": (5, 30), "c": (10, 40), "d": (4, 20), "e": (15, 50, 5)},
    ),
    Template(
        "fuel",
        "A van uses {a} liters of fuel for every 100 kilometers. {name} drives it for {b} kilometers, and a liter of "
        "fuel costs ${c}. How many dollars does the fuel for the trip cost?",
        (
            "The trip is [hundreds = b / 100] times 100 kilometers long.",
            "The van uses [liters = hundreds * a] liters.",
            "The fuel costs [cost = liters * c] dollars.",
        ),
        {"a": (5, 18), "b": (200, 3000, 100), "c": (2, 5)},
    ),
    Template(
        "tickets",
        "A ticket for the {place} costs ${p} for adults and half as much for children. A group of {a} adults and {b} "
        "children goes to the {place}. How many dollars do the tickets cost?",
        (
            "A ticket for a child costs [half = p / 2] dollars.",
            "The adults pay [adults = a * p] dollars.",
            "The children pay [children = b * half] dollars.",
            "Together the tickets cost [total = adults + children] dollars.",
        ),
        {"p": (8, 40, 2), "a": (2, 12), "b": (3, 25)},
        {"place": ("zoo", "museum", "circus", "theater")},
    ),
    Template(
        "machines",
        "{m} equal machines make {n} parts in {h} hours. How many parts does one machine make in {k} hours?",
        (
            "In one hour all machines make [hourly = n / h] parts.",
            "In one hour one machine makes [one = hourly / m] parts.",
            "In {k} hours it makes [made = one * k] parts.",
        ),
        {"m": (2, 9), "n": (120, 2400, 12), "h": (2, 8), "k": (3, 15)},
    ),
    Template(
        "collections",
        "{name} has {a} {items}. {other} has {b} more {items} than {name}, and {third} has twice as many as {other}. "
        "How many {items} do the three have together?",
        (
            "{other} has [second = a + b] {items}.",
            "{third} has [double = second * 2] {items}.",
            "Together they have [all = a + second + double] {items}.",
        ),
        {"a": (10, 90), "b": (4, 60)},
        {"items": ("stamps", "coins", "postcards", "comics")},
    ),
    Template(
        "cartons",
        "A farm collects {a} eggs a day for {d} days. {b} eggs are broken, and the others are packed in cartons of "
        "{c}. How many cartons are filled?",
        (
            "The farm collects [eggs = a * d] eggs.",
            "Of these, [good = eggs - b] are not broken.",
            "They fill [full = good / c] cartons.",
        ),
        {"a": (30, 150), "d": (2, 7), "b": (3, 40), "c": (6, 12, 2)},
    ),
)
