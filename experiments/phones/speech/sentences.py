"""Sentences for synthetic speech: a small grammar, without end, the same for the same seed.

They mean little. What counts is that they sound: common words in the order of English, function words
as frequent as they are, and all phones of the language.
"""

import numpy as np

_WORDS = {
    "noun": """
        actor afternoon airport apple aunt autumn baby bath beach bell bird boat book bottle
        box boy branch bread breath bridge brother bus butcher candle car carpet castle cat
        chair cheese child church city clock cloth coat coffee college colour corner cottage
        country cousin crowd cup daughter desk doctor dog door dream driver dust ear earth
        engine evening eye face family farmer feather field finger fire fish flag floor
        flower foot forest fork friend fruit garden ghost girl glass goat gold grass guard
        guest guitar hair hammer hand harbour hat heart hedge hill horse hospital hour house
        island jacket jar jewel joke journey judge juice kettle key kitchen knife ladder
        lady lake lamp language leaf letter library light lion machine map market match
        meadow measure milk mirror money month moon morning mother mountain mouse mouth
        museum music needle neighbour nephew newspaper night noise nurse ocean office oil
        onion orange oven owl page paint pair paper park path pencil people piano picture
        pillow place plate pleasure pocket poem point potato price prince question rabbit
        radio rain ribbon river road roof room rope rose sailor salt sand school scissors
        sea season shadow shape sheep shelf ship shirt shoe shop shoulder sister sky smoke
        snow soldier song spoon spring square squirrel stair star station stone storm story
        street summer sun sword table tailor teacher thief thread throat thumb thunder tiger
        tooth tower town toy train treasure tree truth uncle valley vase village vision
        visitor voice wall watch water weather wheel widow window wine winter wolf woman
        wood world yard year youth zebra zoo
    """,
    "adjective": """
        ancient angry awful bitter blue brave bright broad brown busy calm careful cheap
        clean clever cold cool curious dark deep dirty dry dusty early easy empty enormous
        fair false famous fast fine foolish foreign fresh gentle giant glad golden good grey
        happy heavy huge hungry joyful kind large late lazy light little lonely long loud
        lovely lucky mild modern narrow new nice noisy old orange pale patient plain polite
        poor proud pure quick quiet rare red rich rough round royal rude rusty sad safe
        sharp short shy silent silver simple slow small smooth soft sour square steady
        strange strong sudden sweet tall thick thin tiny tired tough true ugly unusual usual
        vague warm weak weary wet white whole wide wild wise wooden yellow young
    """,
    "verb": """
        answered asked believed blamed bought brought broke called carried caught changed
        chased chose cleaned closed collected covered crossed described drew dropped enjoyed
        fed finished followed forgot found gave guarded heard helped hid judged joined kept
        kicked kissed knew left liked lost loved made measured met missed moved needed
        noticed opened painted passed praised promised pulled pushed reached remembered
        saved saw sold shared showed stole taught thanked threw told took touched trusted
        used visited wanted washed watched wished wore wrote
    """,
    "went": """
        argued arrived awoke began breathed came climbed coughed cried danced disappeared
        drove fell flew floated grew hurried jumped laughed listened lived looked marched
        paused played prayed ran rested returned sang sat shivered shouted slept smiled
        stayed stood stopped suffered swam talked thought travelled trembled vanished waited
        walked wandered went whispered worked
    """,
    "adverb": """
        again almost always badly before calmly carefully certainly daily early easily
        exactly finally gently gladly hardly however later loudly maybe mostly nearly never
        now often once perhaps quickly quietly rarely really seldom slowly somehow sometimes
        soon still suddenly surely then there together tomorrow twice usually very well
        yesterday
    """,
    "name": """
        Adam Agnes Alice Andrew Arthur Beth Charles Charlotte Chloe David Edith Emma Felix
        Frank George Grace Hannah Harry Helen Hugh Isabel Jack James Joan John Joseph Judith
        Kate Leo Louise Margaret Martha Michael Nora Oliver Oscar Paul Peter Rachel Roger
        Rose Ruth Sarah Simon Sophie Theo Thomas Ursula Victor Vera Walter Yvonne Zoe
    """,
    "place": """
        Africa Austria Boston Chicago China Dublin Egypt England Florence Georgia Japan
        Kansas London Madrid Norway Oxford Paris Russia Scotland Spain Texas Vienna Zurich
    """,
    "number": """
        two three four five six seven eight nine ten eleven twelve thirteen twenty forty
        fifty sixty hundred thousand several both few many some
    """,
    "preposition": """
        about above across after against along around at before behind below beneath beside
        between beyond by down for from in inside into near of off on outside over past
        through towards under until up upon with without within
    """,
    "determiner": "the the the the a a a this that his her our their your my every each another no",
    "pronoun": "he she they we you I it everyone nobody somebody",
    "joiner": "and and but because so while when until although if where",
    "modal": "will would can could may might should must shall did",
    "plain": """
        answer ask believe bring build buy call catch change choose close come drive eat
        enjoy find finish give go have hear help hold join judge keep know laugh learn leave
        like listen live lose love make measure meet move open play read remember run save
        say see sell show sing sit sleep speak stand start stay take teach tell think throw
        touch trust try use visit wait walk want wash watch wear wish work write
    """,
}
LEXICON = {kind: words.split() for kind, words in _WORDS.items()}
_GROUPS = (
    ("determiner", "noun"),
    ("determiner", "adjective", "noun"),
    ("determiner", "adjective", "adjective", "noun"),
    ("name",),
    ("number", "adjective", "noun"),
)
_CLAUSES = (
    ("GROUP", "verb", "GROUP"),
    ("GROUP", "verb", "GROUP", "preposition", "GROUP"),
    ("GROUP", "went", "preposition", "GROUP"),
    ("GROUP", "went", "adverb"),
    ("adverb", "pronoun", "verb", "GROUP"),
    ("pronoun", "modal", "plain", "GROUP", "preposition", "place"),
    ("pronoun", "modal", "adverb", "plain", "GROUP"),
    ("preposition", "GROUP", "GROUP", "verb", "GROUP"),
)


def sentence(rng: np.random.Generator) -> str:
    """Return a random sentence of one or two clauses.

    >>> import numpy as np
    >>> sentence(np.random.default_rng(1))[-1]
    '.'
    """
    words = _clause(rng)
    if rng.random() < 0.4:
        words += [_pick(rng, LEXICON["joiner"]), *_clause(rng)]
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _clause(rng: np.random.Generator) -> list[str]:
    kinds: list[str] = []
    for part in _pick(rng, _CLAUSES):
        kinds += _pick(rng, _GROUPS) if part == "GROUP" else [part]
    return [_pick(rng, LEXICON[kind]) for kind in kinds]


def _pick(rng, options):
    return options[int(rng.integers(len(options)))]
