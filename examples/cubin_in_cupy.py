"""Launch a compiled kernel from CuPy: the quantizer of rows, without lokakern's launcher.

Compiles the kernel for the GPU here, or for an H200 without one, and loads its file with
`cupy.RawModule`. Prints the file, and whether CuPy's launch wrote the bytes of `lokakern.quantize`;
without a GPU and CuPy it prints what is left out.
"""

import torch

import lokakern
from lokakern.build.cubins import cubins
from lokakern.problems import make_problem
from lokakern.types import Format, Operand

ROWS, COLUMNS = 4096, 512


def main() -> None:
    x = Operand(Format.FLOAT32)
    problem = make_problem("quantize", (ROWS, COLUMNS), a=x, out_format="e4m3fn")
    here = torch.cuda.is_available()
    (cubin,) = cubins("cuda.quantize_row", problem, None if here else "NVIDIA H200")
    print(f"{cubin.entry}: {cubin.path.stat().st_size} bytes in {cubin.path.name}")
    try:
        import cupy
    except ImportError:
        cupy = None
    if cupy is None or not here:
        print("not launched: that needs a GPU and CuPy (pip install '.[cupy]' in a clone)")
        return

    function = cupy.RawModule(path=str(cubin.path)).get_function(cubin.entry)
    rows = cupy.random.standard_normal((ROWS, COLUMNS), dtype=cupy.float32)
    data = cupy.empty((ROWS, COLUMNS), dtype=cupy.uint8)
    scale = cupy.empty((ROWS, 1), dtype=cupy.float32)
    # As quantize.cu says: a warp takes a row of this length. Strides are those of x, data, scale.
    threads = int(cubin.macros["THREADS"])
    strides = [cupy.int64(stride) for stride in (COLUMNS, COLUMNS, 0)]
    blocks = -(-ROWS * 32 // threads)
    function((blocks,), (threads,), (rows, data, scale, cupy.int32(ROWS), *strides))
    expected = lokakern.quantize(rows)
    print(f"equal bytes: {bool((data == expected.data).all() and (scale == expected.scale).all())}")


if __name__ == "__main__":
    main()
