"""Word problems about counts, times, lengths and ages; `evals.stories` says how to read them."""

from typing import Final

from evals.stories import SMALL, Template

__all__ = ["AMOUNTS"]

AMOUNTS: Final = (
    Template(
        "boxes",
        "{name} buys {a} boxes of {items} with {b} {items} in each box. {They} gives {c} {items} to {other}. "
        "How many {items} does {name} have left?",
        ("{name} buys [total = a * b] {items}.", "After giving some away, {they} has [left = total - c] {items} left."),
        {"a": (3, 15), "b": (4, 24), "c": (5, 60)},
        {"items": SMALL},
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
        {"items": SMALL},
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
