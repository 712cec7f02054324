"""The built-in texts: many scripts, one word to more than a model can take."""

from pathlib import Path

from tei_grpc.errors import StartupError

QUERY = "How does photosynthesis work?"

_PARAGRAPH = (
    "Plants turn light into sugar. In the leaves, chlorophyll catches sunlight; its energy splits water into hydrogen "
    "and oxygen, and the hydrogen, with carbon dioxide from the air, becomes glucose. "
)

TEXTS: tuple[str, ...] = (
    "a",
    "Hello, world!",
    "photosynthesis",
    "Plants use sunlight to make sugar from water and carbon dioxide.",
    "The stock market fell by three per cent on Monday.",
    "Can I get a refund if the parcel arrives late?",
    "Die Straßenbahn fährt heute über die Brücke am Übergang.",
    "Où est la bibliothèque la plus proche, s'il vous plaît ?",
    "El niño comió una manzana y después salió a jugar.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Τα φυτά μετατρέπουν το φως σε ενέργεια.",  # noqa: RUF001 - it is Greek
    "光合作用将光能转化为化学能。",
    "北京 tower 2024",
    "光合成は植物が光から糖を作る仕組みです。",
    "광합성은 빛을 에너지로 바꾸는 과정이다.",
    "النباتات تصنع السكر من ضوء الشمس.",
    "צמחים מייצרים סוכר מאור השמש.",
    "पौधे सूर्य के प्रकाश से भोजन बनाते हैं।",
    "พืชใช้แสงอาทิตย์ในการสร้างอาหาร",
    "cafe\u0301 and caf\u00e9 look the same",
    "😀👩‍👩‍👧 emoji, and a tab\tbetween words",
    "def add(a: int, b: int) -> int:\n    return a + b  # code",
    "https://example.org/search?q=embedding&page=2 costs $12.50 (20% off)",
    "WHY ARE THERE SO MANY CAPITAL LETTERS?",
    _PARAGRAPH.strip(),
    (_PARAGRAPH * 4).strip(),
    (_PARAGRAPH * 16).strip(),
)


def read_texts(file: Path) -> tuple[str, ...]:
    """The lines of a UTF-8 file that are not blank. Raises StartupError when there is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"`--texts`: cannot read {str(file)!r}: {type(error).__name__}") from error
    texts = tuple(line for line in lines if line.strip())
    if not texts:
        raise StartupError(f"`--texts`: {str(file)!r} holds no text")
    return texts
