// How long the stages of fused tasks take, where a caller has asked for that: all threads' time together.
#pragma once
#include <cstdint>

#include "abi.h"

// Whether stages are timed; what a clock says in nanoseconds; adds some of these to a stage.
bool sa_times_stages();
int64_t sa_clock();
void sa_spend(int stage, int64_t nanoseconds);

namespace {

// The stages of one task, one after another: each ends where the next begins. `all`: the one that all of them are parts of. Parts of a
// stage are timed within it, but not where there is such an `all`.
class Laps {
 public:
  explicit Laps(SaStage all = SA_STAGES) : all_(all), timed_(sa_times_stages()), last_(timed_ ? sa_clock() : 0) {}
  ~Laps() {
    for (int stage = 0; timed_ && stage < SA_STAGES; ++stage)
      if (spent_[stage]) sa_spend(stage, spent_[stage]);
  }
  Laps(const Laps&) = delete;
  Laps& operator=(const Laps&) = delete;

  void end(SaStage stage) {
    if (timed_) spend(all_ == SA_STAGES ? stage : all_, &last_);
  }
  void begin_parts() {
    if (timed_ && all_ == SA_STAGES) last_part_ = sa_clock();
  }
  void end_part(SaStage part) {
    if (timed_ && all_ == SA_STAGES) spend(part, &last_part_);
  }

 private:
  void spend(SaStage stage, int64_t* last) {
    const int64_t time = sa_clock();
    spent_[stage] += time - *last;
    *last = time;
  }

  SaStage all_;
  bool timed_;
  int64_t last_, last_part_ = 0;
  int64_t spent_[SA_STAGES] = {};  // added up when the task ends: threads would wait for each other's sums
};

}  // namespace
