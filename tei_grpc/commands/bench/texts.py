"""The built-in texts: lengths as passages in a search index have them, of common words."""

import math
import random

WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also did many off before must well back through years where much your way down "
    "should because long each just state people those too world little good very make year still see own work men day"
)
MEDIAN, SIGMA = 70, 0.7  # words, lognormal
LEAST, MOST = 6, 400
SHORT = "what is deep learning and how does it work"


def make_texts(count: int) -> list[str]:
    """Always the same ones."""
    random_words = random.Random(0)  # noqa: S311
    lengths = (random_words.lognormvariate(math.log(MEDIAN), SIGMA) for _ in range(count))
    return [" ".join(random_words.choices(WORDS.split(), k=int(min(max(length, LEAST), MOST)))) for length in lengths]
