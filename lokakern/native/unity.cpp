// One unit of translation: half the time of four, which share torch's headers.
#include "driver.cpp"
#include "ops.cpp"
#include "plan.cpp"
#include "python.cpp"
