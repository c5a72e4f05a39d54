// Serves a converted model without Python: see export.py, which writes the files.
//
//   serve model.plans model.pt2 input.pt output.pt [calls]
//
// Loads the plans of lokakern's ops, then the package of AOTInductor, runs it on the tensor in
// input.pt (torch.save), writes the output, and prints the time of loading and of a call.
#include <ATen/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef SERVE_WITH_GRAPHS
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#endif

extern "C" __attribute__((visibility("default"))) const char* lokakern_load_plans(const char* path, int device);

namespace {

using Model = torch::inductor::AOTIModelPackageLoader;

double seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

std::vector<char> contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A copy to the CPU waits for the GPU.
void wait_for(const at::Tensor& output) { output.flatten().slice(0, 0, 1).cpu(); }

double ms_per_call(Model& model, const std::vector<at::Tensor>& inputs, int calls) {
  wait_for(model.run(inputs)[0]);
  const double start = seconds();
  std::vector<at::Tensor> outputs;
  for (int i = 0; i < calls; ++i) outputs = model.run(inputs);
  wait_for(outputs[0]);
  return 1e3 * (seconds() - start) / calls;
}

#ifdef SERVE_WITH_GRAPHS
// Prints the time of a replay, and returns the output of the last one.
at::Tensor run_in_graph(Model& model, const std::vector<at::Tensor>& inputs, int calls) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  model.run(inputs);
  c10::cuda::getCurrentCUDAStream().synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const at::Tensor output = model.run(inputs)[0];
  graph.capture_end();
  for (int i = 0; i < 3; ++i) graph.replay();
  wait_for(output);
  const double start = seconds();
  for (int i = 0; i < calls; ++i) graph.replay();
  wait_for(output);
  std::cout << "ms_per_call_in_graph " << 1e3 * (seconds() - start) / calls << std::endl;
  return output.clone();
}
#endif

void serve(const std::string& plans, const std::string& package, const std::string& input,
           const std::string& output, int calls) {
  const c10::InferenceMode inference;
  // The CUDA context is the process's and takes as long without a model.
  const auto inputs = torch::jit::pickle_load(contents(input)).toTensor().to(at::kCUDA);
  wait_for(inputs);
  const double start = seconds();
  if (const char* reason = lokakern_load_plans(plans.c_str(), inputs.device().index()))
    throw std::runtime_error(reason);
  const double after_plans = seconds();
  // One thread: a call then records no events, which CUDA graphs do not allow.
  Model model(package, "model", /*run_single_threaded=*/true, 1, inputs.device().index());
  const double loaded = seconds();
  std::cout << "load_s " << loaded - start << "\nload_plans_s " << after_plans - start << std::endl;
  at::Tensor made = model.run({inputs})[0].cpu();
  std::cout << "first_call_s " << seconds() - loaded << std::endl;
  std::cout << "ms_per_call " << ms_per_call(model, {inputs}, calls) << std::endl;
#ifdef SERVE_WITH_GRAPHS
  const at::Tensor replayed = run_in_graph(model, {inputs}, calls).cpu();
  std::cout << "equal_in_graph " << made.equal(replayed) << std::endl;
#endif
  const std::vector<char> bytes = torch::jit::pickle_save(made);
  std::ofstream file(output, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + output);
}

}  // namespace

int main(int count, char** given) {
  if (count != 5 && count != 6) {
    std::cerr << "usage: serve model.plans model.pt2 input.pt output.pt [calls]\n";
    return 2;
  }
  const int calls = count == 6 ? std::atoi(given[5]) : 100;
  if (calls < 1) {
    std::cerr << "serve: calls is " << given[5] << "; expected a number from 1 on\n";
    return 2;
  }
  try {
    serve(given[1], given[2], given[3], given[4], calls);
  } catch (const std::exception& error) {
    std::cerr << "serve: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
