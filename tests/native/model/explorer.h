// Goes through every execution of a scenario on the machine of machine.h: every order of the threads' atomic
// operations, every store that a load may return, every place that a store may take. States are compared (whole
// machine, whole stacks), so that a state is gone on from once and loops end.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "machine.h"

namespace model {

struct Scenario {
  std::string name;
  int threads;
  std::function<void()> set_up;  // makes the shared objects, before any thread
  void (*body)(int thread);      // what each thread does; it may hold no memory but its stack
  std::function<void()> take_down = [] {};
};

// One memory order replaced: at `site`, on the atomics named `location`.
struct Mutation {
  int site = -1;
  std::string location;
  std::memory_order order = std::memory_order_seq_cst;
};

// A place where the scenario names an order.
struct Use {
  uint8_t site;
  std::string location;
  Kind kind;
  std::memory_order order;
  bool operator<(const Use& other) const;
};

using Outcome = std::vector<int64_t>;

struct Result {
  uint64_t states = 0, steps = 0;
  std::string fault;               // empty: none in any execution
  std::vector<std::string> trace;  // the steps that lead to the fault
  std::set<Outcome> outcomes;      // values given to outcome(), over all executions
  std::set<Use> uses;
};

struct Limits {
  uint64_t states = 60'000'000;  // more is a fault
  bool reduce = true;            // commuting requests in one order alone (Machine::commutes)
};

Result explore(const Scenario& scenario, const Mutation& mutation = {}, const Limits& limits = {});

std::string order_name(std::memory_order order);
std::string location_name(int location);

// What a policy and a body call, inside explore().
int new_location(uint64_t value, int lifetime);
int new_plain(uint64_t value);
void name_location(int location, const std::string& name);  // several may share a name
uint64_t act(Kind kind, int location, int site, std::memory_order order, uint64_t operand);
uint64_t read_plain(int variable);
void write_plain(int variable, uint64_t value);
void outcome(int index, int64_t value);
void expect(bool condition, const char* what);
int current_lifetime();
void set_lifetime(int plain);  // of the locations made from now on; -1: none

}  // namespace model
