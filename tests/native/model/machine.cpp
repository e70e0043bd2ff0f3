#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace model {
namespace {

void raise(Positions& to, const Positions& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
}

void learn(Facts& to, const Facts& from) {
  raise(to.view, from.view);
  raise(to.before, from.before);
  for (size_t i = 0; i < to.accesses.size(); ++i) to.accesses[i] |= from.accesses[i];
}

// Bits of a plain variable: 0 for its last write, 1 + t for the last read of thread t. Bits of one variable lie in one
// word.
constexpr int kBits = kMaxThreads + 1, kPerWord = 64 / kBits;
static_assert(2 * kPerWord == kMaxPlain);

uint64_t bits(int variable, uint64_t which) {
  return which << (variable % kPerWord * kBits);
}

constexpr uint64_t kWriteBit = 1, kReadBits = (uint64_t{1} << kBits) - 2;

}  // namespace

bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}

bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}

void Machine::clear(int thread_count) {
  *this = Machine{};
  threads = thread_count;
  for (Thread& t : thread) t.facts.accesses.fill(~uint64_t{0});
}

int Machine::add_location(uint64_t value, int lifetime) {
  if (locations == kMaxLocations) std::fprintf(stderr, "model: more than %d atomics\n", kMaxLocations), std::abort();
  Location& l = location[static_cast<size_t>(locations)];
  l.count = 1;
  l.lifetime = static_cast<int8_t>(lifetime);
  l.stores[0].value = value;
  l.stores[0].message.accesses.fill(~uint64_t{0});
  return locations++;
}

int Machine::add_plain(uint64_t value) {
  if (plains == kMaxPlain) std::fprintf(stderr, "model: more than %d plain variables\n", plains), std::abort();
  plain[static_cast<size_t>(plains)] = value;
  return plains++;
}

template <class Visit>
void Machine::for_each_facts(Visit visit) {
  for (int t = 0; t < threads; ++t) visit(thread[static_cast<size_t>(t)].facts);
  for (int x = 0; x < locations; ++x) {
    Location& l = location[static_cast<size_t>(x)];
    for (int p = 0; p < l.count; ++p) visit(l.stores[static_cast<size_t>(p)].message);
  }
}

// Every set of predecessors in S.
template <class Visit>
void Machine::for_each_before(Visit visit) {
  for_each_facts([&](Facts& facts) { visit(facts.before); });
  for (int x = 0; x < locations; ++x) {
    Location& l = location[static_cast<size_t>(x)];
    visit(l.gone);
    for (int p = 0; p < l.count; ++p) {
      visit(l.stores[static_cast<size_t>(p)].write);
      visit(l.stores[static_cast<size_t>(p)].reads);
    }
  }
}

uint32_t Machine::options(int index) const {
  const Thread& t = thread[static_cast<size_t>(index)];
  const Request& request = t.request;
  if (t.status == Status::kEnded || t.status == Status::kAsleep) return 0;
  if (t.status == Status::kWoken) return 1;
  if (request.kind == Kind::kFutexWake) return 1;
  if (request.kind == Kind::kJoin) return thread[request.operand].status == Status::kEnded ? 1 : 0;
  const size_t x = request.location;
  const Location& l = location[x];
  int oldest = t.facts.view[x];
  if (request.kind != Kind::kFutexWait && request.order == std::memory_order_seq_cst) {
    oldest = std::max<int>(oldest, t.facts.before[x]);
  }
  if (request.kind == Kind::kFutexWait) oldest = std::max<int>(oldest, l.kernel);
  uint32_t found = 0;
  for (int p = oldest; p < l.count; ++p) {
    const bool next_follows = p + 1 < l.count && l.stores[static_cast<size_t>(p) + 1].follows;
    switch (request.kind) {
      case Kind::kLoad:
        found |= uint32_t{1} << p;
        break;
      case Kind::kStore:
        if (!next_follows) found |= uint32_t{1} << (p + 1);
        break;
      case Kind::kAdd:
        if (!next_follows) found |= uint32_t{1} << p;
        break;
      default:
        found |= 1;
        if (l.stores[static_cast<size_t>(p)].value == request.operand) found |= uint32_t{1} << kSleep;
    }
  }
  return found;
}

bool Machine::commutes(int index) const {
  const Thread& t = thread[static_cast<size_t>(index)];
  if (t.status == Status::kWoken) return true;
  if (t.status != Status::kReady) return false;
  if (t.request.kind == Kind::kJoin) return thread[t.request.operand].status == Status::kEnded;
  return t.request.kind == Kind::kStore && t.request.order != std::memory_order_seq_cst &&
         location[t.request.location].lifetime < 0;
}

// Gives a seq_cst operation its place in S. `place` is the store that it reads, or that it writes when it reads none;
// `*own` becomes its set of predecessors, itself included.
void Machine::order_operation(int index, int place, bool reads, bool writes, Positions* own) {
  const size_t x = thread[static_cast<size_t>(index)].request.location;
  Location& l = location[x];
  Positions set = thread[static_cast<size_t>(index)].facts.before;
  // Earlier by coherence order: operations on stores that come before, and, for a store, loads of those; for a load,
  // the store it reads; for a read-modify-write, other loads of that store too.
  raise(set, l.gone);
  for (int p = 0; p < place; ++p) {
    raise(set, l.stores[static_cast<size_t>(p)].write);
    raise(set, l.stores[static_cast<size_t>(p)].reads);
  }
  Store& at = l.stores[static_cast<size_t>(place)];
  if (reads) raise(set, at.write);
  if (reads && writes) raise(set, at.reads);
  const int mine = reads && writes ? place + 1 : place;
  set[x] = std::max(set[x], static_cast<uint8_t>(mine));
  // Later by coherence order: operations that already have a place further on get this one, and all before it, as
  // predecessors, and so does every set that holds one of them.
  for_each_before([&](Positions& other) {
    if (other[x] > mine) raise(other, set);
  });
  *own = set;
}

void Machine::load(int index, int place, std::memory_order order, bool writes) {
  Thread& t = thread[static_cast<size_t>(index)];
  const size_t x = t.request.location;
  Store& from = location[x].stores[static_cast<size_t>(place)];
  if (order == std::memory_order_seq_cst && !writes) {
    Positions own;
    order_operation(index, place, true, false, &own);
    raise(from.reads, own);
    t.facts.before = own;
  }
  t.facts.view[x] = std::max(t.facts.view[x], static_cast<uint8_t>(place));
  if (acquires(order)) learn(t.facts, from.message);
}

// Puts a store at `place`. `read`: what the store before carried, when this one is a read-modify-write of it.
void Machine::insert(int index, int place, uint64_t value, std::memory_order order, bool follows, const Facts* read) {
  Thread& t = thread[static_cast<size_t>(index)];
  const size_t x = t.request.location;
  Location& l = location[x];
  if (l.count == kMaxStores) std::fprintf(stderr, "model: more than %d stores to keep\n", kMaxStores), std::abort();
  // All places from here on move up by one.
  for_each_facts([&](Facts& facts) { facts.view[x] = static_cast<uint8_t>(facts.view[x] + (facts.view[x] >= place)); });
  for_each_before([&](Positions& set) { set[x] = static_cast<uint8_t>(set[x] + (set[x] >= place)); });
  if (l.kernel >= place) ++l.kernel;
  for (int p = l.count; p > place; --p) l.stores[static_cast<size_t>(p)] = l.stores[static_cast<size_t>(p) - 1];
  ++l.count;
  Store& s = l.stores[static_cast<size_t>(place)];
  s = Store{};
  s.value = value;
  s.follows = follows;
  const Positions before = t.facts.before;  // without this operation: strongly-happens-before needs a later one
  if (order == std::memory_order_seq_cst) {
    Positions own;
    order_operation(index, follows ? place - 1 : place, follows, true, &own);
    s.write = own;
    t.facts.before = own;
  }
  t.facts.view[x] = static_cast<uint8_t>(place);
  if (read != nullptr) s.message = *read;
  if (releases(order)) {
    Facts carried = t.facts;
    carried.before = before;
    learn(s.message, carried);
  }
  s.message.view[x] = std::max(s.message.view[x], static_cast<uint8_t>(place));
}

bool Machine::perform(int index, int option, const char** fault) {
  Thread& t = thread[static_cast<size_t>(index)];
  const Request request = t.request;
  const size_t x = request.location;
  if (request.kind == Kind::kJoin) {
    learn(t.facts, thread[request.operand].facts);
    return true;
  }
  if (t.status == Status::kWoken) {
    t.status = Status::kReady;
    return true;
  }
  Location& l = location[x];
  if (l.lifetime >= 0) {
    if (plain[static_cast<size_t>(l.lifetime)] != 0 || !read_plain(index, l.lifetime)) {
      *fault = "an atomic is used after its end, or its end is not ordered after this use";
      return false;
    }
  }
  switch (request.kind) {
    case Kind::kLoad:
      t.result = l.stores[static_cast<size_t>(option)].value;
      load(index, option, request.order, false);
      break;
    case Kind::kStore:
      insert(index, option, request.operand, request.order, false, nullptr);
      break;
    case Kind::kAdd: {
      const Facts read = l.stores[static_cast<size_t>(option)].message;
      t.result = l.stores[static_cast<size_t>(option)].value;
      const Positions before = t.facts.before;
      // The message is joined in before the store is made: what it carries happens before a release by the same
      // operation. Its predecessors in S are those of the program alone, though.
      load(index, option, request.order, true);
      const Positions joined = t.facts.before;
      t.facts.before = before;
      insert(index, option + 1, t.result + request.operand, request.order, true, &read);
      raise(t.facts.before, joined);
      break;
    }
    case Kind::kFutexWait:
      if (option == kSleep) t.status = Status::kAsleep;
      break;
    case Kind::kFutexWake:
      l.kernel = std::max(l.kernel, t.facts.view[x]);
      for (int other = 0; other < threads; ++other) {
        Thread& sleeper = thread[static_cast<size_t>(other)];
        if (sleeper.status == Status::kAsleep && sleeper.request.location == x) sleeper.status = Status::kWoken;
      }
      break;
    default:
      break;
  }
  return true;
}

bool Machine::read_plain(int index, int variable) {
  Facts& facts = thread[static_cast<size_t>(index)].facts;
  const auto word = static_cast<size_t>(variable / kPerWord);
  if ((facts.accesses[word] & bits(variable, kWriteBit)) == 0) return false;
  const uint64_t mine = bits(variable, uint64_t{2} << index);
  for_each_facts([&](Facts& other) { other.accesses[word] &= ~mine; });
  facts.accesses[word] |= mine;
  return true;
}

bool Machine::write_plain(int index, int variable) {
  Facts& facts = thread[static_cast<size_t>(index)].facts;
  const auto word = static_cast<size_t>(variable / kPerWord);
  const uint64_t all = bits(variable, kWriteBit | kReadBits);
  if ((facts.accesses[word] & all) != all) return false;
  for_each_facts([&](Facts& other) {
    other.accesses[word] |= bits(variable, kReadBits);
    other.accesses[word] &= ~bits(variable, kWriteBit);
  });
  facts.accesses[word] |= all;
  return true;
}

// What every thread knows adds nothing to a message, so all messages may as well carry it.
void Machine::normalise() {
  std::array<uint64_t, 2> known{~uint64_t{0}, ~uint64_t{0}};
  Positions oldest, before;
  oldest.fill(255);
  before.fill(255);
  bool any = false;
  for (int i = 0; i < threads; ++i) {
    const Thread& t = thread[static_cast<size_t>(i)];
    if (t.status == Status::kEnded) continue;
    any = true;
    for (size_t w = 0; w < known.size(); ++w) known[w] &= t.facts.accesses[w];
    for (size_t x = 0; x < oldest.size(); ++x) {
      oldest[x] = std::min(oldest[x], t.facts.view[x]);
      before[x] = std::min(before[x], t.facts.before[x]);
    }
  }
  if (!any) return;
  if (before != Positions{}) for_each_before([&](Positions& set) { raise(set, before); });
  for_each_facts([&](Facts& facts) {
    for (size_t w = 0; w < known.size(); ++w) facts.accesses[w] |= known[w];
  });
  for (int i = 0; i < locations; ++i) {
    const auto x = static_cast<size_t>(i);
    const uint8_t drop = oldest[x];
    Location& l = location[x];
    if (drop > 0) {
      for (int p = 0; p < drop; ++p) {
        raise(l.gone, l.stores[static_cast<size_t>(p)].write);
        raise(l.gone, l.stores[static_cast<size_t>(p)].reads);
      }
      for (int p = drop; p < l.count; ++p) l.stores[static_cast<size_t>(p - drop)] = l.stores[static_cast<size_t>(p)];
      l.count -= drop;
      const auto lower = [&](uint8_t& place) { place = static_cast<uint8_t>(place > drop ? place - drop : 0); };
      for_each_facts([&](Facts& facts) { lower(facts.view[x]); });
      for_each_before([&](Positions& set) { lower(set[x]); });
      lower(l.kernel);
    }
    l.stores[0].follows = 0;
  }
}

}  // namespace model
