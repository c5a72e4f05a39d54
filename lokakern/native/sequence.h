#pragma once

#include <torch/csrc/python_headers.h>

namespace lokakern {

// call_sequence(sequence, x, describe): the output of a `lokakern.nn.static_handoff.
// BoundedSequential` for as many rows as its last call had, or None: Python decides. Where a
// setting may hold at these rows its `_handed` runs; elsewhere modules of well-known classes are
// called without Python, others as Python calls them. ``describe`` is that of call_layer. Raises
// C++ exceptions, such as LaunchFailure.
PyObject* call_sequence(PyObject*, PyObject* const* given, Py_ssize_t count);

}  // namespace lokakern
