"""Word problems about prices, pay and profit; `evals.stories` says how to read them."""

from typing import Final

from evals.stories import GOODS, PRICEY, Template

__all__ = ["MONEY"]

MONEY: Final = (
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
        {"thing": PRICEY},
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
        {"things": GOODS},
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
        {"thing": PRICEY},
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
        "profit",
        "{name} makes {a} {things} to sell at the market. Each costs ${b} to make and is sold for ${c}. The stall "
        "costs ${d}. If {they} sells all of them, what is {their} profit in dollars?",
        (
            "On each piece {name} earns [each = c - b] dollars.",
            "On all {things} {they} earns [gain = each * a] dollars.",
            "After paying for the stall, {their} profit is [profit = gain - d] dollars.",
        ),
        {"a": (12, 60), "b": (3, 12), "c": (8, 30), "d": (10, 90, 5)},
        {"things": GOODS},
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
)
