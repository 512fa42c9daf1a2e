"""Words that tasks draw from. No adjective ends another and no noun begins another, so that no compound is found
inside another one.
"""

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CITIES = _words(
    """
    Lisbon Oslo Vienna Cairo Lima Nairobi Dublin Prague Athens Seoul Quito Helsinki Warsaw Madrid Tokyo Havana Riga
    Toronto Geneva Bergen Dakar Hanoi Accra Porto Tunis Zagreb Bogota Jakarta Sydney Boston Delhi Rome
    """
)

ADJECTIVES = _words(
    """
    amber ancient bitter blue bold brave bright broken brown busy calm cheap clean clever cold cool crisp curious
    dark deep distant dry dusty early eager empty faint fair famous fancy fast fierce final flat foreign fresh
    friendly frozen gentle giant glad golden grand gray green happy hard heavy hidden hollow honest huge humble idle
    jolly keen kind large lazy light lively lonely long loud lucky mellow mild misty modern narrow neat new noble
    odd orange pale plain polite proud pure purple quick quiet rapid rare rich rough round royal rusty sad
    sharp shiny silent silver simple sleepy slow small smooth soft solid sour spare steady stern still strange
    strong sudden sunny sweet swift tall tame tender thick thin tidy tiny tired tough vast violet warm wet white
    wide wild wise wooden yellow young
    """
)

NOUNS = _words(
    """
    anchor apple arrow attic badger bakery barrel basket beach bell bench blanket bottle bridge brush bucket button
    cabin camel candle canyon castle cellar chair cherry church circle clock cloud coat comet copper corner cottage
    cradle crane creek curtain desert diamond dolphin door dragon drum eagle engine falcon farmer feather fence
    ferry field flag flute forest fountain fox garden gate glacier glove guitar hammer harbor hill honey horse hotel
    island jacket jewel kettle kitchen ladder lake lantern lemon letter library lion lizard lobster magnet maple
    market meadow mirror monkey mountain museum needle nest ocean olive orchard otter oven owl palace panther paper
    parrot pencil pepper piano pigeon pillow planet pocket pond potato rabbit raven ribbon river robin rocket saddle
    sailor salmon school shadow shelf ship shovel signal spider spoon squirrel stable stone sugar table temple tiger
    tower train trumpet tunnel turtle valley village violin wagon walnut whale wheel whistle window wolf zebra
    """
)

COMPOUNDS = len(ADJECTIVES) * len(NOUNS)

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def compounds(random: Random, count: int) -> list[str]:
    """So many different words such as "quiet-river", at most `COMPOUNDS`."""
    numbers = random.sample(range(COMPOUNDS), count)
    return [f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}" for number in numbers]


def variables(random: Random, count: int) -> list[str]:
    """So many different names of four capital letters."""
    numbers = random.sample(range(26**4), count)
    return ["".join(_LETTERS[number // 26**place % 26] for place in range(4)) for number in numbers]
