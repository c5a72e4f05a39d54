#include "arrays.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "driver.h"

namespace lokakern {
namespace {

namespace py = pybind11;

constexpr size_t kMostAxes = 8;
constexpr size_t kMostStreams = 64, kMostIdle = 16;

ArrayLibrary& bound() {
  static auto* const made = new ArrayLibrary;
  return *made;
}

// torch's streams by handle and GPU; guarded by Python's lock.
std::unordered_map<uint64_t, c10::Stream>& streams() {
  static auto* const made = new std::unordered_map<uint64_t, c10::Stream>;
  return *made;
}

py::object stolen(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

py::object attribute(PyObject* object, PyObject* name) {
  return stolen(PyObject_GetAttr(object, name));
}

py::object number(int64_t value) { return stolen(PyLong_FromLongLong(value)); }

py::object call(PyObject* function, std::initializer_list<PyObject*> arguments) {
  return stolen(PyObject_Vectorcall(function, arguments.begin(), arguments.size(), nullptr));
}

struct Attributes {
  PyObject* const data = PyUnicode_InternFromString("data");
  PyObject* const device_id = PyUnicode_InternFromString("device_id");
  PyObject* const dtype = PyUnicode_InternFromString("dtype");
  PyObject* const library = PyUnicode_InternFromString("library");
  PyObject* const ptr = PyUnicode_InternFromString("ptr");
  PyObject* const shape = PyUnicode_InternFromString("shape");
  PyObject* const strides = PyUnicode_InternFromString("strides");
  PyObject* const tensor = PyUnicode_InternFromString("tensor");
};

const Attributes& attributes() {
  static const Attributes made;
  return made;
}

// --- CuPy's objects in memory, as cupy/_core/core.pxd and cupy/cuda/memory.pxd of 13 and 14 declare
// them. Through attributes and constructors an operand takes 0.4 us more, and a result 1.0 us.
// `has_known_layout` tells whether the arrays that CuPy makes are laid out so.

struct ArrayFields {
  PyObject head;
  void* methods;
  PyObject* weak_references;
  Py_ssize_t size;
  std::vector<Py_ssize_t> shape, strides;  // strides in bytes
  int is_c_contiguous, is_f_contiguous, is_indexed_by_32_bits;
  PyObject *dtype, *data, *base;
};

struct PointerFields {
  PyObject head;
  void* methods;
  intptr_t address;
  int device_id;
  PyObject* memory;
};

ArrayFields& fields_of(PyObject* array) { return *reinterpret_cast<ArrayFields*>(array); }

PyObject* construct(const py::object& shape, PyObject* dtype, const py::object& place,
                    const py::object& strides) {
  PyObject* given[] = {shape.ptr(), dtype, place.ptr(), strides.ptr()};
  auto* const type = reinterpret_cast<PyObject*>(bound().array);
  return PyObject_Vectorcall(type, given, strides ? 4 : 3, nullptr);
}

// An array of contiguous memory.
PyObject* lay_out(at::IntArrayRef sizes, PyObject* dtype, int64_t item, PyObject* place) {
  static PyObject* const nothing = PyTuple_New(0);
  PyTypeObject* const type = bound().array;
  PyObject* const made = type->tp_base->tp_new(type, nothing, nullptr);
  if (!made) return nullptr;
  ArrayFields& fields = fields_of(made);
  fields.shape.assign(sizes.begin(), sizes.end());
  fields.strides.resize(sizes.size());
  Py_ssize_t elements = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    fields.strides[i] = elements * item;
    elements *= sizes[i];
  }
  fields.size = elements;
  fields.is_c_contiguous = 1;
  fields.is_f_contiguous =
      std::count_if(sizes.begin(), sizes.end(), [](int64_t size) { return size != 1; }) <= 1;
  fields.is_indexed_by_32_bits = elements * item <= int64_t{1} << 31;
  const auto set = [](PyObject*& field, PyObject* value) {
    Py_INCREF(value);
    Py_XSETREF(field, value);
  };
  set(fields.dtype, dtype);
  set(fields.data, place);
  return made;
}

py::object tuple_of(at::IntArrayRef axes, int64_t unit) {
  PyObject* const made = PyTuple_New(static_cast<Py_ssize_t>(axes.size()));
  for (size_t i = 0; made && i < axes.size(); ++i)
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(axes[i] * unit));
  return stolen(made);
}

constexpr int64_t kAddress = 0x123456789000, kDevice = 3;  // nobody reads there

// Whether an array that CuPy made, contiguous or with these strides, lies as declared above.
bool lies_as_declared(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                      PyObject* dtype, int64_t item, const py::object& place) {
  const auto made = stolen(construct(tuple_of(sizes, 1), dtype, place,
                                     strides.empty() ? py::object() : tuple_of(strides, 1)));
  if (!made) return false;
  const ArrayFields& found = fields_of(made.ptr());
  const auto* const pointer = reinterpret_cast<const PointerFields*>(place.ptr());
  const auto elements = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies());
  // Scalars first: only then are vectors where they are looked for.
  if (found.size != elements || found.dtype != dtype || found.data != place.ptr() ||
      found.base != Py_None || pointer->address != kAddress ||
      pointer->device_id != kDevice || found.shape.size() != sizes.size() ||
      found.strides.size() != sizes.size() ||
      !std::equal(sizes.begin(), sizes.end(), found.shape.begin()))
    return false;
  if (!strides.empty())
    return std::equal(strides.begin(), strides.end(), found.strides.begin()) &&
           !found.is_c_contiguous;
  const auto own = stolen(lay_out(sizes, dtype, item, place.ptr()));
  if (!own) return false;
  const ArrayFields& laid = fields_of(own.ptr());
  return laid.shape == found.shape && laid.strides == found.strides && laid.size == found.size &&
         laid.is_c_contiguous == found.is_c_contiguous &&
         laid.is_f_contiguous == found.is_f_contiguous &&
         laid.is_indexed_by_32_bits == found.is_indexed_by_32_bits && laid.dtype == found.dtype &&
         laid.data == found.data && laid.base == found.base;
}

bool has_known_layout() {
  const ArrayLibrary& with = bound();
  const auto size_of = [](PyObject* type) {
    return reinterpret_cast<PyTypeObject*>(type)->tp_basicsize;
  };
  const PyTypeObject* const base = with.array->tp_base;
  if (with.array->tp_basicsize != sizeof(ArrayFields) || !base ||
      base->tp_basicsize != sizeof(ArrayFields) ||
      size_of(with.pointer) != sizeof(PointerFields) || with.dtypes.empty())
    return false;
  const auto memory = call(with.memory, {number(kAddress).ptr(), number(1 << 20).ptr(), Py_None,
                                         number(kDevice).ptr()});
  const auto place = memory ? call(with.pointer, {memory.ptr(), number(0).ptr()}) : memory;
  if (!place) return false;
  for (const auto& [dtype, type] : with.dtypes) {
    const auto item = static_cast<int64_t>(c10::elementSize(type));
    if (!lies_as_declared({3, 5}, {7 * item, item}, dtype, item, place)) return false;
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{3, 5}, {1, 7}, {7, 1}, {6}, {2, 3, 4}, {1 << 20, 1 << 12}})
      if (!lies_as_declared(sizes, {}, dtype, item, place)) return false;
  }
  return true;
}

// --- facts of arrays

struct Facts {
  uint64_t address = 0;
  int64_t device_id = 0;
  std::optional<at::ScalarType> dtype;
  size_t rank = 0;
  std::array<int64_t, kMostAxes> sizes, strides;  // strides in bytes
};

std::optional<at::ScalarType> dtype_of(PyObject* dtype) {
  for (const auto& [known, type] : bound().dtypes)
    if (dtype == known) return type;
  for (const auto& [known, type] : bound().dtypes)  // equal ones may be other objects
    if (PyObject_RichCompareBool(dtype, known, Py_EQ) == 1) return type;
  PyErr_Clear();
  return std::nullopt;
}

PyObject* object_of(at::ScalarType dtype) {
  for (const auto& [object, known] : bound().dtypes)
    if (dtype == known) return object;
  return nullptr;
}

bool read_laid_out(PyObject* array, Facts& facts) {
  const ArrayFields& fields = fields_of(array);
  const auto& pointer = *reinterpret_cast<const PointerFields*>(fields.data);
  facts.rank = fields.shape.size();
  if (facts.rank > kMostAxes || fields.strides.size() != facts.rank || fields.data == Py_None)
    return false;
  facts.address = static_cast<uint64_t>(pointer.address);
  facts.device_id = pointer.device_id;
  facts.dtype = dtype_of(fields.dtype);
  std::copy(fields.shape.begin(), fields.shape.end(), facts.sizes.begin());
  std::copy(fields.strides.begin(), fields.strides.end(), facts.strides.begin());
  return true;
}

bool read_attributes(PyObject* array, Facts& facts) {
  const Attributes& of = attributes();
  const py::object data = attribute(array, of.data), shape = attribute(array, of.shape),
                   strides = attribute(array, of.strides), dtype = attribute(array, of.dtype);
  const py::object address = data ? attribute(data.ptr(), of.ptr) : py::object();
  const py::object device_id = data ? attribute(data.ptr(), of.device_id) : py::object();
  if (!address || !device_id || !shape || !strides || !dtype || !PyTuple_CheckExact(shape.ptr()) ||
      !PyTuple_CheckExact(strides.ptr()))
    return false;
  facts.rank = static_cast<size_t>(PyTuple_GET_SIZE(shape.ptr()));
  if (facts.rank > kMostAxes ||
      PyTuple_GET_SIZE(strides.ptr()) != PyTuple_GET_SIZE(shape.ptr()))
    return false;
  for (size_t i = 0; i < facts.rank; ++i) {
    const auto at = static_cast<Py_ssize_t>(i);
    facts.sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), at));
    facts.strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.ptr(), at));
  }
  facts.address = PyLong_AsUnsignedLongLong(address.ptr());
  facts.device_id = PyLong_AsLongLong(device_id.ptr());
  facts.dtype = dtype_of(dtype.ptr());
  return !PyErr_Occurred();
}

// --- tensors

// Tensors of calls that are over, for the next arrays: to make and to end one takes 0.2 us.
std::list<TakenArrays::Item>& idle() {
  thread_local std::list<TakenArrays::Item> items;
  return items;
}

at::Tensor made_on(c10::Device device, at::ScalarType dtype) {
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), size_t{0}, at::DataPtr(nullptr, device)),
      c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
}

// What memory of an array does when its last tensor ends, in any thread.
void let_go(void* array) {
  if (!Py_IsInitialized()) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(static_cast<PyObject*>(array));
  PyGILState_Release(state);
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

constexpr const char* kOwner = "lokakern.tensor";

void end_owner(PyObject* capsule) {
  auto* const impl = static_cast<c10::TensorImpl*>(PyCapsule_GetPointer(capsule, kOwner));
  c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(impl);
}

py::object owner_of(at::Tensor tensor) {
  auto made = stolen(PyCapsule_New(tensor.unsafeGetTensorImpl(), kOwner, end_owner));
  if (made) tensor.unsafeReleaseTensorImpl();
  return made;
}

}  // namespace

const ArrayLibrary& array_library() { return bound(); }

void bind_arrays(ArrayLibrary made) {
  bound() = std::move(made);
  bound().has_known_layout = has_known_layout();
  PyErr_Clear();
  streams().clear();
}

const at::Tensor* TakenArrays::add(PyObject* array) {
  Facts facts;
  const bool is_read = bound().has_known_layout ? read_laid_out(array, facts)
                                                : read_attributes(array, facts);
  if (!is_read || !facts.dtype || !facts.address) {
    PyErr_Clear();
    return nullptr;
  }
  const at::ScalarType dtype = *facts.dtype;
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t bytes = item;  // to the end of the last element
  for (size_t i = 0; i < facts.rank; ++i) {
    // Python tells what is wrong with negative strides.
    if (facts.sizes[i] <= 0 || facts.strides[i] < 0 || facts.strides[i] % item) return nullptr;
    bytes += (facts.sizes[i] - 1) * facts.strides[i];
    facts.strides[i] /= item;
  }
  const c10::Device device = bound().is_cuda
                                 ? c10::Device(c10::kCUDA, static_cast<int8_t>(facts.device_id))
                                 : c10::Device(c10::kCPU);
  const auto fits = [&](const Item& item) {
    return item.tensor.scalar_type() == dtype && item.tensor.device() == device &&
           item.tensor.is_inference() == c10::InferenceMode::is_enabled();
  };
  const auto found = std::find_if(idle().begin(), idle().end(), fits);
  if (found != idle().end())
    items_.splice(items_.begin(), idle(), found);
  else
    items_.push_front({made_on(device, dtype), nullptr});
  Item& taken = items_.front();
  Py_INCREF(array);
  taken.array = array;
  auto* const storage = storage_of(taken.tensor);
  storage->set_data_ptr_noswap({reinterpret_cast<void*>(facts.address), device});
  storage->set_nbytes(static_cast<size_t>(bytes));
  taken.tensor.unsafeGetTensorImpl()->set_sizes_and_strides({facts.sizes.data(), facts.rank},
                                                            {facts.strides.data(), facts.rank});
  return &taken.tensor;
}

TakenArrays::~TakenArrays() {
  while (!items_.empty()) {
    Item& item = items_.front();
    PyObject* const array = std::exchange(item.array, nullptr);
    auto* const storage = storage_of(item.tensor);
    if (item.tensor.use_count() > 1 || item.tensor.storage().use_count() > 1) {
      const at::DataPtr& memory = storage->data_ptr();
      storage->set_data_ptr_noswap({memory.get(), array, let_go, memory.device()});
      items_.pop_front();
      continue;
    }
    if (idle().size() < kMostIdle)
      idle().splice(idle().begin(), items_, items_.begin());
    else
      items_.pop_front();
    Py_DECREF(array);
  }
}

bool has_dtype(at::ScalarType dtype) { return object_of(dtype) != nullptr; }

PyObject* give_array(const at::Tensor& made) {
  const ArrayLibrary& to = bound();
  const auto item = static_cast<int64_t>(made.element_size());
  int64_t bytes = item;  // to the end of the last element
  for (int64_t i = 0; i < made.dim(); ++i) bytes += (made.size(i) - 1) * made.stride(i) * item;
  const auto owner = owner_of(made);
  if (!owner) return nullptr;
  const auto memory =
      call(to.memory, {number(reinterpret_cast<int64_t>(made.data_ptr())).ptr(),
                       number(bytes).ptr(), owner.ptr(),
                       number(to.is_cuda ? made.get_device() : 0).ptr()});
  const auto place = memory ? call(to.pointer, {memory.ptr(), number(0).ptr()}) : memory;
  if (!place) return nullptr;
  PyObject* const dtype = object_of(made.scalar_type());
  const bool has_gaps = !made.is_contiguous();
  if (to.has_known_layout && !has_gaps) return lay_out(made.sizes(), dtype, item, place.ptr());
  const auto shape = tuple_of(made.sizes(), 1);
  const auto strides = has_gaps ? tuple_of(made.strides(), item) : py::object();
  return shape && (strides || !has_gaps) ? construct(shape, dtype, place, strides) : nullptr;
}

PyObject* tensor_of_quantized(PyObject* quantized) {
  const py::object library = attribute(quantized, attributes().library);
  const py::object tensor = attribute(quantized, attributes().tensor);
  PyErr_Clear();
  return library.ptr() == bound().library ? tensor.ptr() : nullptr;  // the object keeps it
}

PyObject* quantized_of_tensor(PyObject* tensor) {
  PyTypeObject* const type = bound().quantized;
  auto made = stolen(type->tp_alloc(type, 0));
  if (!made) return nullptr;
  const std::pair<PyObject*, PyObject*> fields[] = {{attributes().tensor, tensor},
                                                    {attributes().library, bound().library}};
  for (const auto& [name, value] : fields)  // the class itself is frozen
    if (PyObject_GenericSetAttr(made.ptr(), name, value)) return nullptr;
  return made.release().ptr();
}

OnCurrentStream::OnCurrentStream(c10::Device device) {
  if (!has_streams(device)) return;
  const int index = device.has_index() ? device.index() : 0;
  const py::object stream = call(bound().current, {number(index).ptr()});
  const py::object given = stream ? attribute(stream.ptr(), attributes().ptr) : py::object();
  if (!given) throw py::error_already_set();
  auto handle = PyLong_AsUnsignedLongLong(given.ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  if (handle == 1) handle = 0;  // the default stream by another name
  if (reinterpret_cast<void*>(handle) == current_stream(index)) return;
  const uint64_t key = handle * 64 + static_cast<uint64_t>(index);
  auto found = streams().find(key);
  if (found == streams().end()) {
    const py::object made = py::handle(bound().entered)(handle, index);
    if (streams().size() >= kMostStreams) streams().clear();
    found = streams().emplace(key, made.cast<c10::Stream>()).first;
  }
  before_ = exchange_stream(found->second);
}

OnCurrentStream::~OnCurrentStream() {
  if (before_) exchange_stream(*before_);
}

}  // namespace lokakern
