#pragma once

#include <torch/csrc/python_headers.h>

namespace lokakern {

// call_sequence(sequence, x, describe): the output of a `lokakern.nn.static_handoff.
// BoundedSequential` at rows at which none of its settings hold, or None: Python decides.
// Modules of well-known classes are called without Python, others as Python calls them. ``describe``
// is that of call_layer. Raises C++ exceptions, such as LaunchFailure.
PyObject* call_sequence(PyObject*, PyObject* const* given, Py_ssize_t count);

}  // namespace lokakern
