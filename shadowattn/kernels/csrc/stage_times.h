// How long the stages of fused tasks take, where a caller has asked for that: all threads' time together.
#pragma once
#include <chrono>
#include <cstdint>

#include "abi.h"

// Whether stages are timed. Adds nanoseconds to a stage.
bool sa_times_stages();
void sa_spend(int stage, int64_t nanoseconds);

namespace {

// The stages of one task, one after another: each ends where the next begins. `all`: the one that all of them are parts of.
class Laps {
 public:
  explicit Laps(SaStage all = SA_STAGES) : all_(all), timed_(sa_times_stages()), last_(timed_ ? now() : 0) {}

  void end(SaStage stage) {
    if (!timed_) return;
    const int64_t time = now();
    sa_spend(all_ == SA_STAGES ? stage : all_, time - last_);
    last_ = time;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  SaStage all_;
  bool timed_;
  int64_t last_;
};

}  // namespace
