"""One pass over the state of the gated delta rule, generated as LLVM code that keeps sums in
registers. Addresses and strides are in bytes."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.block_vectors import load, store
from kernels.cpu.state_cells import FLOAT32, load_state, round_state, state_bytes
from kernels.cpu.vectors import fma, splat

_F32, _I64 = ir.FloatType(), ir.IntType(64)
# What a pass does. BOTH: it updates and then reads; STREAMED: it updates a target that must be
# aligned to 64 bytes and is not kept in caches.
READ, UPDATE, BOTH, STREAMED = 1, 2, 3, 6


@intrinsic(prefer_literal=True)
def state_pass(  # noqa: PLR0913
    typing_context, places, keys, depth, decay, change, sums, kind, vectors, lanes, does
):
    """Update a block of a state, [depth, vectors * lanes], and compute its products with the next
    key and query, in one pass.

    places: (source, its row stride, target, its row stride). UPDATE: target = decay * source + key
    * change, with the key at keys[0] and the row ``change``. READ: the sums at ``sums`` become the
    products of the key and the query at keys[1] with the target; without UPDATE, with the source.
    A key is ``depth`` float32, followed by its query. kind: the state's type in memory (see
    `kernels.cpu.state_cells`), to which the target is rounded. kind, vectors, lanes, does:
    literals."""
    literals = (kind, vectors, lanes, does)
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    numbers = [given.literal_value for given in literals]

    def build(context, builder, signature, args):
        places, keys = (
            [builder.extract_value(args[number], i) for i in range(count)]
            for number, count in ((0, 4), (1, 2))
        )
        _Pass(builder, places, keys, args[2:6], *numbers).emit()
        return context.get_dummy_value()

    four, two = types.UniTuple(types.intp, 4), types.UniTuple(types.intp, 2)
    kinds = (four, two, types.intp, types.float32, types.intp, types.intp)
    return types.void(*kinds, *literals), build


class _Pass:
    """Emits the loop over the rows of a block."""

    def __init__(self, builder, places, keys, rest, stored, vectors, lanes, does) -> None:  # noqa: PLR0913
        self.builder = builder
        self.places = places
        self.now, self.following = keys
        self.depth, self.decay, self.change, self.sums = rest
        self.stored = stored
        self.vectors = range(vectors)
        self.kind = ir.VectorType(_F32, lanes)
        self.updates, self.reads = bool(does & UPDATE), bool(does & READ)
        self.streams = does == STREAMED

    def emit(self) -> None:
        builder, kind = self.builder, self.kind
        zero = ir.Constant(kind, [0.0] * kind.count)
        self.decays = splat(builder, self.decay, kind.count)
        self.changes = [self._load(self.change, v) for v in self.vectors] if self.updates else []
        before, loop = builder.block, builder.append_basic_block("keys")
        done = builder.append_basic_block("stored")
        builder.branch(loop)
        builder.position_at_end(loop)
        row = builder.phi(_I64)
        sums = [builder.phi(kind) for _ in (*self.vectors, *self.vectors)] if self.reads else []
        added = self._row(row, sums)
        following = builder.add(row, _I64(1))
        carried = [(total, zero, last) for total, last in zip(sums, added, strict=True)]
        for phi, first, last in [(row, _I64(0), following), *carried]:
            phi.add_incoming(first, before)
            phi.add_incoming(last, loop)
        builder.cbranch(builder.icmp_signed("<", following, self.depth), loop, done)
        builder.position_at_end(done)
        for v, total in enumerate(added):
            store(builder, total, self._place(self.sums, v, 4))

    def _row(self, row, sums):
        """Emit one row of the pass. Returns the new sums."""
        builder = self.builder
        source, stride, target, target_stride = self.places
        source = builder.add(source, builder.mul(row, stride))
        target = builder.add(target, builder.mul(row, target_stride))
        lanes, size = self.kind.count, state_bytes(self.stored)
        sources = [self._place(source, v, size) for v in self.vectors]
        values = [load_state(builder, place, self.stored, lanes) for place in sources]
        if self.updates:
            key = self._scalar(self.now, row)
            for v in self.vectors:
                decayed = builder.fmul(values[v], self.decays)
                value = fma(builder, key, self.changes[v], decayed)
                written, values[v] = round_state(builder, value, self.stored)
                self._store(written, self._place(target, v, size))
        if not self.reads:
            return []
        query = builder.add(row, self.depth)
        factors = [self._scalar(self.following, at) for at in (row, query)]
        given = [(factor, value) for factor in factors for value in values]
        return [fma(builder, *pair, total) for pair, total in zip(given, sums, strict=True)]

    def _place(self, address, vector, size):
        """Emit the address of a vector in a row of elements of `size` bytes."""
        return self.builder.add(address, _I64(vector * self.kind.count * size))

    def _store(self, value, address):
        """Emit the store of a vector, past the caches in a pass that is STREAMED."""
        builder = self.builder
        if not self.streams:
            store(builder, value, address, 4 if self.stored == FLOAT32 else 2)
            return
        place = builder.inttoptr(address, value.type.as_pointer())
        stored = builder.store(value, place, align=16 * state_bytes(self.stored))
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))

    def _load(self, address, vector):
        return load(self.builder, self._place(address, vector, 4), self.kind)

    def _scalar(self, address, index):
        """Emit a float32 in all lanes."""
        builder = self.builder
        place = builder.add(address, builder.mul(index, _I64(4)))
        return splat(builder, load(builder, place, _F32), self.kind.count)
