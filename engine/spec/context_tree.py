"""A compiled tree that counts which tokens followed each context of a text.

A context is the sequence of tokens before a position, read backwards, so one descent finds the
longest context that occurred before. Sources: the contexts of PPM (Cleary and Witten 1984) in a
path-compressed tree over a sliding window (Fiala and Greene 1989, Larsson 1999). An edge refers to
its tokens in the text, at the newest occurrence of its context.

A tree is one int32 array: a head, rows, a hash index of the rows, and the text in a ring buffer. A
row is identified by its index in the array; 0 means no row. A row is a *node*, which represents all
contexts that occurred at the same positions, or a *follower*: a token that occurred after the
contexts of a node. Texts that must not share contexts have separate roots.

A token adds at most two nodes and three followers (Blumer et al. 1985): 5 rows of 32 bytes. A tree
has 4 rows for each token of its ring buffer, as texts need fewer; it takes 164 bytes per token. It
is full when it has no free row or its ring buffer is full."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, njit, types
from numpy.typing import NDArray

from engine.config.env import kernel_cache

Array = NDArray[np.int32]

# The head: start and length of the index and of the text, most tokens of a context, the position
# added last, the first row never used, the first freed row (a list linked through TOKEN), and the
# number of free rows.
INDEX, SLOTS, TEXT, LENGTH, DEPTH, NEWEST, FRESH, FREE, LEFT, HEAD = 0, 1, 2, 3, 4, 5, 6, 7, 8, 16
# Fields of all rows: the key in the index. For a node: its parent and ~ the first token of the edge
# from there. For a follower: its node and its token.
OWNER, TOKEN = 0, 1
# Fields of a node: length of its longest context, the newest position of its end, how often it
# occurred, the XOR of all its children, its first follower and the most frequent one (0: unknown).
LONG, PLACE, COUNT, BELOW, FIRST, BEST = 2, 3, 4, 5, 6, 7
# Fields of a follower: how often it occurred, next and previous follower of the node, newest
# position.
TIMES, NEXT, BEFORE, LAST = 2, 3, 4, 5
ROW = 8
NO_ROW = np.int64(0)
GONE = -1  # the owner of a free row

ROWS_A_TOKEN = 4
SLOTS_A_TOKEN = 8
NO_RING = np.int64((1 << 31) - 1)  # the mask of a text that is not a ring
ROUND = 1e-6  # against rounding: 0.29 * 100 is less than 29

# For functions that only compiled functions call; those need no wrapper for calls from Python.
compiled = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def size(length: int) -> int:
    """Length of the int32 array that holds a tree over ``length`` tokens."""
    return HEAD + length * (ROWS_A_TOKEN * ROW + SLOTS_A_TOKEN + 1)


def make(length: int, depth: int) -> Array:
    """Make an empty tree over at most ``length`` tokens, a power of two, for contexts of up to
    ``depth`` tokens. Its array takes memory only as it is filled."""
    tree: Array = np.zeros(size(length), dtype=np.int32)
    tree[INDEX] = HEAD + length * ROWS_A_TOKEN * ROW
    tree[SLOTS] = length * SLOTS_A_TOKEN
    tree[TEXT] = tree[INDEX] + tree[SLOTS]
    tree[LENGTH], tree[DEPTH], tree[FRESH] = length, depth, HEAD
    tree[LEFT] = length * ROWS_A_TOKEN
    return tree


def text_of(tree: Array) -> Array:
    """The tree's ring buffer of tokens, as a view that callers write new tokens into."""
    return tree[int(tree[TEXT]) :]


def grown(tree: Array) -> Array:
    """A copy of a tree with twice its capacity. No token may have been removed from the tree."""
    larger = make(2 * int(tree[LENGTH]), int(tree[DEPTH]))
    larger[FRESH] = fresh = int(tree[FRESH])
    larger[NEWEST], larger[LEFT] = tree[NEWEST], larger[LEFT] - (fresh - HEAD) // ROW
    larger[HEAD:fresh] = tree[HEAD:fresh]
    text_of(larger)[: int(tree[LENGTH])] = text_of(tree)
    enter_rows(larger)
    return larger


# -- rows and their index: open addressing; entries after a freed place move up


@compiled  # type: ignore[untyped-decorator]
def _home(tree: Any, owner: Any, token: Any) -> Any:
    """The first place in the hash index to look for the row with this owner and token."""
    code = (np.uint64(owner) << np.uint64(32)) ^ np.uint64(token)
    code = (code ^ (code >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return np.int64(code >> np.uint64(33)) & (np.int64(tree[SLOTS]) - 1)


@compiled  # type: ignore[untyped-decorator]
def _find(tree: Any, owner: Any, token: Any) -> Any:
    """Find a row by its owner and token. Returns the index of its hash entry in ``tree``; the entry
    is 0 if there is no such row."""
    index, mask = np.int64(tree[INDEX]), np.int64(tree[SLOTS]) - 1
    at = _home(tree, owner, token)
    while True:
        row = np.int64(tree[index + at])
        if not row or (tree[row + OWNER] == owner and tree[row + TOKEN] == token):
            return index + at
        at = (at + 1) & mask


@compiled  # type: ignore[untyped-decorator]
def _get(tree: Any, owner: Any, token: Any) -> Any:
    return np.int64(tree[_find(tree, owner, token)])


@compiled  # type: ignore[untyped-decorator]
def _leave_index(tree: Any, row: Any) -> None:
    index, mask = np.int64(tree[INDEX]), np.int64(tree[SLOTS]) - 1
    hole = _find(tree, np.int64(tree[row + OWNER]), np.int64(tree[row + TOKEN])) - index
    at = (hole + 1) & mask
    while tree[index + at]:
        other = np.int64(tree[index + at])
        home = _home(tree, np.int64(tree[other + OWNER]), np.int64(tree[other + TOKEN]))
        if ((at - home) & mask) >= ((at - hole) & mask):
            tree[index + hole] = other
            hole = at
        at = (at + 1) & mask
    tree[index + hole] = 0


@compiled  # type: ignore[untyped-decorator]
def _take(tree: Any, owner: Any, token: Any) -> Any:
    """Allocate a row, filled with 0 except for its owner and token, and return it. It is entered in
    the hash index unless ``owner`` is 0."""
    row = np.int64(tree[FREE])
    if row:
        tree[FREE] = tree[row + TOKEN]
    else:
        row = np.int64(tree[FRESH])
        tree[FRESH] += ROW
    tree[LEFT] -= 1
    for at in range(row, row + ROW):
        tree[at] = 0
    tree[row + OWNER], tree[row + TOKEN] = owner, token
    if owner:
        tree[_find(tree, owner, token)] = row
    return row


@compiled  # type: ignore[untyped-decorator]
def _give_back(tree: Any, row: Any) -> None:
    tree[row + OWNER], tree[row + TOKEN] = GONE, tree[FREE]
    tree[FREE] = row
    tree[LEFT] += 1


# -- followers


@compiled  # type: ignore[untyped-decorator]
def _new_follower(tree: Any, node: Any, token: Any) -> Any:
    row = _take(tree, node, token)
    first = np.int64(tree[node + FIRST])
    tree[node + FIRST], tree[row + NEXT] = row, first
    if first:
        tree[first + BEFORE] = row
    else:
        tree[node + BEST] = row
    return row


@compiled  # type: ignore[untyped-decorator]
def _drop_follower(tree: Any, node: Any, row: Any) -> None:
    before, position = np.int64(tree[row + BEFORE]), np.int64(tree[row + NEXT])
    tree[(before + NEXT) if before else (node + FIRST)] = position
    if position:
        tree[position + BEFORE] = before
    if tree[node + BEST] == row:
        tree[node + BEST] = 0
    _leave_index(tree, row)
    _give_back(tree, row)


@compiled  # type: ignore[untyped-decorator]
def _add(tree: Any, node: Any, token: Any, place: Any) -> None:
    """Count an occurrence of ``token`` after the context of a node. place: index in the ring buffer
    of the context's last token."""
    tree[node + COUNT] += 1
    tree[node + PLACE] = place
    row = _get(tree, node, token)
    if not row:
        row = _new_follower(tree, node, token)
    tree[row + TIMES] += 1
    tree[row + LAST] = place
    best = np.int64(tree[node + BEST])
    if best and tree[row + TIMES] >= tree[best + TIMES]:
        tree[node + BEST] = row


@compiled  # type: ignore[untyped-decorator]
def _subtract(tree: Any, node: Any, token: Any) -> None:
    tree[node + COUNT] -= 1
    row = _get(tree, node, token)
    tree[row + TIMES] -= 1
    if tree[node + BEST] == row:
        tree[node + BEST] = 0
    if not tree[row + TIMES]:
        _drop_follower(tree, node, row)


@compiled  # type: ignore[untyped-decorator]
def _best(tree: Any, node: Any) -> Any:
    """The most frequent follower of a node; of equally frequent followers, the latest one."""
    best = np.int64(tree[node + BEST])
    if best:
        return best
    mask, newest = np.int64(tree[LENGTH]) - 1, np.int64(tree[NEWEST])
    best = row = np.int64(tree[node + FIRST])
    while row:
        more = tree[row + TIMES] - tree[best + TIMES]
        age = (newest - tree[row + LAST]) & mask
        if more > 0 or (more == 0 and age < ((newest - tree[best + LAST]) & mask)):
            best = row
        row = np.int64(tree[row + NEXT])
    tree[node + BEST] = best
    return best


# -- contexts


@compiled  # type: ignore[untyped-decorator]
def _descend(tree: Any, text: Any, last: Any, length: Any, path: Any) -> Any:
    """Search the tree for the ``length`` tokens of a text that end at index ``last``, in backward
    order.

    ``path``: begins with the root; the nodes found are appended. ``text``: (array, index in it at
    which the text begins, mask of its ring buffer). Returns the number of nodes in ``path``, the
    number of tokens found, and the node to which the last edge leads if the search ended within it,
    else 0."""
    array, base, text_mask = text
    ring, mask = np.int64(tree[TEXT]), np.int64(tree[LENGTH]) - 1
    count, at = 1, 0
    while at < length:
        below = _get(tree, path[count - 1], ~np.int64(array[base + ((last - at) & text_mask)]))
        if not below:
            break
        long, place = np.int64(tree[below + LONG]), np.int64(tree[below + PLACE])
        end = min(long, length)
        at += 1
        while at < end:
            if tree[ring + ((place - at) & mask)] != array[base + ((last - at) & text_mask)]:
                break
            at += 1
        if at < long:
            return count, at, below
        path[count] = below
        count += 1
    return count, at, 0


@compiled  # type: ignore[untyped-decorator]
def _replace(tree: Any, old: Any, new: Any) -> None:
    """Replace the node ``old`` by the node ``new`` in the tree."""
    above, token = np.int64(tree[old + OWNER]), np.int64(tree[old + TOKEN])
    tree[_find(tree, above, token)] = new
    tree[new + OWNER], tree[new + TOKEN] = above, token
    tree[above + BELOW] ^= old ^ new


@compiled  # type: ignore[untyped-decorator]
def _split(tree: Any, below: Any, at: Any) -> Any:
    """Split the edge to node ``below`` after the first ``at`` tokens of its context. Returns the
    new node."""
    place = np.int64(tree[below + PLACE])
    node = _take(tree, NO_ROW, NO_ROW)
    _replace(tree, below, node)
    tree[node + PLACE], tree[node + COUNT] = place, tree[below + COUNT]
    tree[node + LONG], tree[node + BELOW] = at, below
    token = ~np.int64(tree[tree[TEXT] + ((place - at) & (np.int64(tree[LENGTH]) - 1))])
    tree[below + OWNER], tree[below + TOKEN] = node, token
    tree[_find(tree, node, token)] = below
    row, best = np.int64(tree[below + FIRST]), 0
    while row:
        new = _new_follower(tree, node, np.int64(tree[row + TOKEN]))
        tree[new + TIMES], tree[new + LAST] = tree[row + TIMES], tree[row + LAST]
        if row == tree[below + BEST]:
            best = new
        row = np.int64(tree[row + NEXT])
    tree[node + BEST] = best
    return node


@compiled  # type: ignore[untyped-decorator]
def _join(tree: Any, node: Any) -> None:
    """Remove a node if it has a single child that occurred at exactly the same positions."""
    below = np.int64(tree[node + BELOW])  # the only child, or a number that is not a child
    if not tree[node + LONG] or below < HEAD or below >= tree[FRESH] or (below - HEAD) % ROW:
        return
    # Followers of the node have the same owner, but only nodes have a negative token.
    if tree[below + OWNER] != node or tree[below + TOKEN] >= 0:
        return
    if tree[below + COUNT] != tree[node + COUNT]:
        return
    while tree[node + FIRST]:
        _drop_follower(tree, node, np.int64(tree[node + FIRST]))
    _leave_index(tree, below)
    _replace(tree, node, below)
    _give_back(tree, node)


@compiled  # type: ignore[untyped-decorator]
def _enter(tree: Any, position: Any, length: Any, path: Any) -> Any:
    """Add the token at ``position``, with the ``length`` tokens before it as context, to the tree.
    Returns False if the tree is full. path: scratch array whose first entry is the root."""
    base, mask = np.int64(tree[TEXT]), np.int64(tree[LENGTH]) - 1
    place = (position - 1) & mask
    token = np.int64(tree[base + (position & mask)])
    count, at, below = _descend(tree, (tree, base, mask), place, length, path)
    num_needed = count + 4
    row = np.int64(tree[below + FIRST]) if below else 0
    while row:
        num_needed += 1
        row = np.int64(tree[row + NEXT])
    if num_needed > tree[LEFT]:
        return False
    tree[NEWEST] = place
    if below:
        path[count] = _split(tree, below, at)
        count += 1
    if at < length:
        first = ~np.int64(tree[base + ((place - at) & mask)])
        leaf = _take(tree, path[count - 1], first)
        tree[leaf + LONG] = length
        tree[path[count - 1] + BELOW] ^= leaf
        path[count] = leaf
        count += 1
    for index in range(1, count):
        _add(tree, path[index], token, place)
    return True


@compiled  # type: ignore[untyped-decorator]
def _forget(tree: Any, position: Any, length: Any, path: Any) -> None:
    """Remove the token at ``position``, which must be the oldest one in the tree. Its context is
    the ``length`` tokens before it."""
    base, mask = np.int64(tree[TEXT]), np.int64(tree[LENGTH]) - 1
    token = np.int64(tree[base + (position & mask)])
    count = _descend(tree, (tree, base, mask), (position - 1) & mask, length, path)[0]
    for index in range(1, count):
        _subtract(tree, path[index], token)
    node = path[count - 1]
    if not tree[node + COUNT]:
        above = np.int64(tree[node + OWNER])
        _leave_index(tree, node)
        tree[above + BELOW] ^= node
        _give_back(tree, node)
        node = above
    _join(tree, node)


@compiled  # type: ignore[untyped-decorator]
def _draft(tree: Any, query: Any, known: Any, most: Any, limits: Any, path: Any) -> Any:
    """Write drafts from one tree into ``query`` after its first ``known`` tokens. Returns the
    number of drafts, and how many of them are expected to be right. path: scratch array that begins
    with the root."""
    num, chance, expected = 0, 1.0, 0.0
    while num < most:
        end = known + num
        length = min(np.int64(tree[DEPTH]), end)
        count, at, below = _descend(tree, (query, np.int64(0), NO_RING), end - 1, length, path)
        if not at:
            break
        if not num:
            most = min(most, max(1, np.int64(limits[0] * at + ROUND)))
        node = below if below else path[count - 1]
        best = _best(tree, node)
        chance *= tree[best + TIMES] / tree[node + COUNT]
        if chance < limits[1]:
            break
        query[end] = tree[best + TOKEN]
        expected += chance
        num += 1
    return num, expected


# -- functions called from Python

_ints = types.Array(types.int32, 1, "C")
_floats = types.Array(types.float64, 1, "C")
_long = types.int64


def _called(*kinds: Any, returns: Any) -> Any:
    """Decorate a function to be compiled at import for these types, or loaded from the cache."""

    def compile_it(function: Any) -> Any:
        before, config.CACHE_DIR = config.CACHE_DIR, kernel_cache() or config.CACHE_DIR
        try:
            return njit(returns(*kinds), cache=True, error_model="numpy")(function)
        except RuntimeError:  # no directory for the cache is writable
            return njit(returns(*kinds), error_model="numpy")(function)
        finally:
            config.CACHE_DIR = before

    return compile_it


@_called(_ints, returns=types.void)  # type: ignore[untyped-decorator]
def enter_rows(tree: Any) -> None:
    """Fill the empty hash index of a tree with all its rows. No row may have been freed before."""
    for row in range(HEAD, np.int64(tree[FRESH]), ROW):
        if tree[row + OWNER]:
            at = _find(tree, np.int64(tree[row + OWNER]), np.int64(tree[row + TOKEN]))
            tree[at] = row


@_called(_ints, _long, returns=_long)  # type: ignore[untyped-decorator]
def change_roots(tree: Any, root: Any) -> Any:
    """Add a root if ``root`` is 0: returns the new root, or 0 if the tree is full. Otherwise free
    ``root``, which must have no tokens left, and return 0."""
    if root:
        _give_back(tree, root)
        return 0
    return _take(tree, NO_ROW, NO_ROW) if tree[LEFT] else 0


@_called(_ints, types.UniTuple(_long, 4), types.boolean, returns=_long)  # type: ignore[untyped-decorator]
def enter(tree: Any, span: Any, is_new: Any) -> Any:
    """Add tokens of a text to the tree or, if not ``is_new``, remove its oldest tokens.

    ``span``: (root of the text, index of its first token, first and end of the tokens to process).
    The ring buffer must contain them and the ``DEPTH`` tokens before them, each at its index modulo
    the buffer's length. Returns the index at which it stopped: before ``end`` only if the tree is
    full."""
    root, begin, first, end = span
    depth = np.int64(tree[DEPTH])
    path = np.empty(depth + 2, dtype=np.int64)
    path[0] = root
    for position in range(max(first, begin + 1), end):
        length = min(depth, position - begin)
        if not is_new:
            _forget(tree, position, length, path)
        elif not _enter(tree, position, length, path):
            return position
    return end


@_called(  # type: ignore[untyped-decorator]
    _ints, _ints, types.UniTuple(_long, 2), _ints, _long, _long, _floats, returns=_long
)
def draft(one: Any, other: Any, roots: Any, query: Any, known: Any, most: Any, limits: Any) -> Any:
    """Draft up to ``most`` tokens after the first ``known`` tokens of ``query``, and write them
    there. Returns the number of drafts.

    Uses the tree in which more drafts are expected to be right. ``roots``: the text's root in
    ``one`` and in ``other``, 0 to skip a tree. ``limits``: (most drafts per token of the context
    that was found, least probability of a draft)."""
    path = np.empty(max(one[DEPTH], other[DEPTH]) + 2, dtype=np.int64)
    kept = np.empty(most, dtype=np.int32)
    num, expected = 0, 0.0
    for which in range(2):
        tree = one if which == 0 else other
        path[0] = roots[which]
        if not path[0]:
            continue
        num_found, num_right = _draft(tree, query, known, most, limits, path)
        if num_right > expected:
            num, expected = num_found, num_right
            for at in range(num):  # a slice would take longer to compile than everything else
                kept[at] = query[known + at]
    for at in range(num):
        query[known + at] = kept[at]
    return num
