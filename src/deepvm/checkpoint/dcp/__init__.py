"""Memory nodes for torch.distributed.checkpoint: FSDP2, tensor-parallel and other sharded states, saved and resharded.

    dcp.save(state, storage_writer=DeepvmWriter("memory://10.0.0.9:7070", run="llama", step=100))
    dcp.load(state, storage_reader=DeepvmReader("memory://10.0.0.9:7070", run="llama"))

All ranks' shards are one safetensors file and one checkpoint of the run, visible once all of it has arrived. A load
reads only the chunks that a rank needs, with any number of ranks.
"""

from deepvm.checkpoint.dcp.reader import DeepvmReader
from deepvm.checkpoint.dcp.writer import DeepvmWriter

__all__ = ["DeepvmReader", "DeepvmWriter"]
