"""The server's half: weights and evaluation keys, no secret key, no image."""

import numpy as np

from multilinear.encrypted import messages
from multilinear.encrypted.backend import EvaluationKeys, ring
from multilinear.encrypted.engine import Engine, Progress, usable_processes
from multilinear.encrypted.plan import check_memory
from multilinear.encrypted.program import Program
from multilinear.errors import MultilinearError


class Server:
    """Evaluates a program on encrypted images of one client. See `Client` for an example of both.

    A message that cannot be right raises one clear `MultilinearError`; the server is as before and goes on.
    """

    def __init__(self, program: Program, evaluation_keys: bytes, processes: int | None = None) -> None:
        program.check()
        self.program = program
        public = program.public
        self.processes = usable_processes(processes)
        message = messages.unpack(evaluation_keys, messages.KEYS, public)
        split = int.from_bytes(message.payload[:8], "little")
        relin, galois = bytes(message.payload[8 : 8 + split]), bytes(message.payload[8 + split :])
        if not 0 < split <= len(message.payload) - 8 or bool(galois) != bool(public.packing.rotations()):
            raise MultilinearError("these evaluation keys are damaged; make them again with keygen")
        self.client = message.keys
        self.keys = EvaluationKeys(ring(public.parameters), relin, galois, public.packing.rotations())
        self._engine: Engine | None = None

    def run(self, data: bytes, progress: Progress | None = None) -> bytes:
        """Classify encrypted images; the answer can be read only with the secret key. Batch by batch."""
        public, primes = self.program.public, self.keys.ring.primes
        message = messages.unpack(data, messages.IMAGES, public, self.client)
        if self._engine is None:
            check_memory(self.program)
            self._engine = Engine(self.program, self.keys, self.processes)
        size, degree = messages.batch_bytes(public), public.parameters.degree
        shape = public.packing.places, public.inputs, 2, len(primes), degree
        answers = []
        with self._engine as engine:
            for start in range(0, len(message.payload), size):
                fresh = messages.read_residues(message.payload[start : start + size], shape, primes, 3)
                if not fresh[:, :, 1].any((2, 3)).all():
                    raise MultilinearError("the message holds images that are not encrypted; use Client.encrypt")
                engine.sources[0][:] = np.moveaxis(fresh, 3, 0)
                answers.append(messages.write_residues(engine.run(progress)))
        return messages.pack(messages.RESULTS, public, self.client, message.count, b"".join(answers))

    def release(self) -> None:
        """Give back the memory that is kept between messages."""
        self._engine = None

    def steps(self, data: bytes) -> int:
        """How many steps `run` will tell `progress` of."""
        message = messages.unpack(data, messages.IMAGES, self.program.public, self.client)
        return messages.batches(self.program.public, message.count) * Engine.steps(self.program)
