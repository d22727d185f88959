// How long the stages of fused tasks take, where a caller has asked for that: all threads' time together.
#pragma once
#include <cstdint>

#include "abi.h"

// Whether stages are timed; what a clock says in nanoseconds; adds some of these to a stage.
bool sa_times_stages();
int64_t sa_clock();
void sa_spend(int stage, int64_t nanoseconds);

namespace {

// The stages of one task, one after another: each ends where the next begins. `all`: the one that all of them are parts of.
class Laps {
 public:
  explicit Laps(SaStage all = SA_STAGES) : all_(all), timed_(sa_times_stages()), last_(timed_ ? sa_clock() : 0) {}

  void end(SaStage stage) {
    if (!timed_) return;
    const int64_t time = sa_clock();
    sa_spend(all_ == SA_STAGES ? stage : all_, time - last_);
    last_ = time;
  }

 private:
  SaStage all_;
  bool timed_;
  int64_t last_;
};

}  // namespace
