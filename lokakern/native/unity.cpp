// One unit of translation, so that torch's headers are read once.
#include "captured.cpp"
#include "driver.cpp"
#include "layer.cpp"
#include "lt.cpp"
#include "ops.cpp"
#include "plan.cpp"
#include "python.cpp"
#include "sequence.cpp"
